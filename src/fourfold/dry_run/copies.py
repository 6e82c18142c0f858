"""Copies of block inputs to the host and back, in a dry run: they are recorded, and the host's memory is not counted."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from fourfold.dry_run.recorder import Recorder
from fourfold.mesh.offloading import Copy


class RecordedCopies:
    """What `fourfold.mesh.offloading.Offloading` copies by; its owner sets the recorder before the model runs."""

    recorder: Recorder

    def to_host(self, tensor: Tensor, name: str) -> Copy:
        size = tensor.numel() * tensor.element_size()
        return Copy((tensor.shape, tensor.dtype), self.recorder.copied("to_host", name, size))

    def to_device(self, on_host: Any, name: str) -> Copy:
        shape, dtype = on_host
        tensor = torch.empty(shape, dtype=dtype)
        size = tensor.numel() * tensor.element_size()
        return Copy(tensor, self.recorder.copied("to_device", name, size))

    def will_free(self, tensor: Tensor) -> None:
        pass

    def take_back(self, on_host: Any) -> None:
        pass

"""The answer to a request that cannot be had exactly."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch

# Folders, not words in a path: somebody may keep all their code in one that is called torch.
_ENGINE = (Path(__file__).parent.parent, Path(torch.__file__).parent)


class UnsupportedError(ValueError):
    """This model cannot be trained exactly on this grid; the message says which module, why, and the way out."""


def line_of_model(frames: Sequence[FrameSummary]) -> str:
    """The innermost line of a stack that is neither PyTorch's nor ours; nothing if there is none."""
    for frame in reversed(frames):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _ENGINE):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""

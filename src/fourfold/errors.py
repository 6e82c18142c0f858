"""The error for models that cannot be trained exactly on a grid."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from traceback import FrameSummary

import torch

# Folders, not words in a path: users may keep their code in a folder called torch.
_ENGINE = (Path(__file__).parent.parent, Path(torch.__file__).parent)


class UnsupportedError(ValueError):
    """This model cannot be trained exactly on this grid; the message names the module, the reason and what to change."""


def line_of_model(frames: Sequence[FrameSummary]) -> str:
    """The innermost line of a stack outside PyTorch and Fourfold; empty if there is none."""
    for frame in reversed(frames):
        if not any(Path(frame.filename).is_relative_to(folder) for folder in _ENGINE):
            return f"{Path(frame.filename).name}:{frame.lineno}: {frame.line}"
    return ""

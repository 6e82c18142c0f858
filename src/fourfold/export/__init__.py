"""Converts a checkpoint to a folder that `from_pretrained` loads, without a model or ranks."""

from fourfold.export.folder import Exported, export

__all__ = ["Exported", "export"]

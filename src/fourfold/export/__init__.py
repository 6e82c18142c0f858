"""From a checkpoint to a folder that `from_pretrained` loads: files in, files out, no model and no ranks."""

from fourfold.export.folder import Exported, export

__all__ = ["Exported", "export"]

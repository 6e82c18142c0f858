"""Checkpoints that a run can trust: sharded, checked, never half written, readable on any grid."""

from fourfold.train.checkpoint.save import Checkpoints, SaveError
from fourfold.train.checkpoint.state import Training

__all__ = ["Checkpoints", "SaveError", "Training"]

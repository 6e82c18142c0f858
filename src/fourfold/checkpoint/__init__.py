"""Checkpoints that a run can trust: sharded, checked, never half written, readable on any grid."""

from fourfold.checkpoint.save import Checkpoints, SaveError
from fourfold.checkpoint.state import TrainState

__all__ = ["Checkpoints", "SaveError", "TrainState"]

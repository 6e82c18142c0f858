"""Sharded checkpoints: hashed, atomic, without pickle, loadable on any grid."""

from fourfold.checkpoint.save import Checkpoints, SaveError
from fourfold.checkpoint.state import TrainState

__all__ = ["Checkpoints", "SaveError", "TrainState"]

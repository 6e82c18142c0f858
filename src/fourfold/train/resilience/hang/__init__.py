"""Detection of hangs: which rank is missing, and in which collective of which module the others wait for it."""

from fourfold.train.resilience.hang.monitor import HangDetector, LostRanks

__all__ = ["HangDetector", "LostRanks"]

"""When ranks wait for one that does not come: who it is, in which collective of which module, in the words of the plan."""

from fourfold.train.resilience.hang.callback import HangWatch, LostRanks

__all__ = ["HangWatch", "LostRanks"]

"""Fourfold: PyTorch-native 4D parallel training, with a planner that says first what a run will take."""

__version__ = "0.1.0"

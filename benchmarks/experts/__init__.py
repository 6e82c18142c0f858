"""Mixture of experts on every way to put them on a grid, against one process."""

"""Optimizers on sharded parameters, and the clipping of gradients."""

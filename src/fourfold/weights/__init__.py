"""Weights on the z and data axes: FSDP2, or prefetched by Fourfold."""

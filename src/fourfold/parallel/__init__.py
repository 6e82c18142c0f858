"""One training step, in parallel."""

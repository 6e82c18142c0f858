"""Fourfold in the trainers of other libraries. Each is imported by itself, and needs its own extra."""

"""The grid of ranks, its axes, and every collective over them."""

"""Text on disk -> tokens in shards -> the rows of a step, in an order that no grid and no restart changes."""

"""Text files -> shards of tokens -> the rows of a step, in an order independent of the grid and of restarts."""

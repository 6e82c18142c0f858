"""The sharded product: what is multiplied, in which memory, as an autograd function, and in a graph."""

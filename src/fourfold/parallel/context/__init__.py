"""Context parallelism: neighbours along z share sequences, each with two chunks of their tokens."""

"""The loss of sharded logits."""

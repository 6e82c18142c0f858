"""From a model, text and a cluster to a trained, exported model."""

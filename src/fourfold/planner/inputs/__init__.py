"""What the planner is given: a model, a cluster, a layout."""

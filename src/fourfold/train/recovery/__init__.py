"""Stop, roll back, or go on without lost replicas."""

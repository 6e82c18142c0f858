"""Measure a cluster for the planner."""

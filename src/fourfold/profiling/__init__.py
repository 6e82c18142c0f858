"""The time and the traffic of one step."""

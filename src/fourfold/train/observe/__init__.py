"""Metrics, logs and reports of a run. Nothing here changes the run."""

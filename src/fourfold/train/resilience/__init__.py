"""Checks during a run: hangs, stragglers, bad steps, replicas that differ."""

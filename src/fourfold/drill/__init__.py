"""Faults, planted on purpose: the same ones in the tests, in `fourfold drill` and in benchmarks."""

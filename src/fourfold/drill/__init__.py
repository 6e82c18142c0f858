"""Fault injection: the same faults in the tests, in `fourfold drill` and in benchmarks."""

"""What a run survives, one file for each kind of fault; `python -m benchmarks.faults` breaks them all."""

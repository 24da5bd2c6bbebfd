"""Benchmark scripts. The documents quote the results in `results/`."""

"""The targets of `benchmarks.fuzz` and the processes that run them."""

"""Parts of the reliability benchmarks: `benchmarks.chaos`, `benchmarks.soak` and `benchmarks.fuzz`."""

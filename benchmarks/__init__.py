"""One script per question; results are committed under `results/` and quoted from there."""

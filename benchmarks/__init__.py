"""Measurements, one script per question. Documents quote the results in `results/`."""

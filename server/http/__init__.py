"""The HTTP edge: wire formats, limits, metric names. Knows no tensors."""

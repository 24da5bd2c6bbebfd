"""The HTTP layer: wire formats, limits and metrics."""

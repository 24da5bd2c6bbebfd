"""The engine: requests, token budget, blocks, steps. Knows no HTTP, JSON or Prometheus."""

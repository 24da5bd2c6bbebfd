"""The engine: requests, token budget, blocks and steps, independent of HTTP, JSON and Prometheus."""

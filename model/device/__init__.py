"""Device memory: the KV cache, transfers and recordings."""

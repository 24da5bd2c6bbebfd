"""Device memory: dtypes, KV cache, transfers and CUDA graph recordings."""

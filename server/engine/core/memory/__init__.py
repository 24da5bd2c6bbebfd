"""The blocks of the KV cache, and the demand for them."""

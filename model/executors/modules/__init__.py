"""Steps by the modules of the library `transformers`, with our attention and cache."""

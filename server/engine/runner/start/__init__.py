"""Starts an engine: loads the model, sizes the cache, compiles and warms up."""

"""The decoder model: configuration, weights, tokenizer, forward pass and sampling.

This package does not depend on requests, time or HTTP.
"""

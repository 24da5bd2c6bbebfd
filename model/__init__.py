"""The decoder model: configuration, weights, tokenizer, forward pass, sampling. Knows no requests, time or HTTP."""

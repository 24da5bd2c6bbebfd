"""Training attention in Triton."""

"""Attention in Triton for every GPU with tensor cores that Triton can use."""

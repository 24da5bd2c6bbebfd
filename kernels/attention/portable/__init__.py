"""Attention in Triton for every GPU whose tensor cores Triton supports."""

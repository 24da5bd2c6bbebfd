"""Rotary embedding and the cache write after it in Triton."""

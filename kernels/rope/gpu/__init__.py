"""Rotary embedding and the cache write behind it in Triton."""

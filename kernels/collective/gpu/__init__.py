"""Collective operations in Triton."""

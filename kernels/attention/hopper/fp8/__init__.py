"""Prefill over an FP8 cache for Hopper GPUs, in Gluon."""

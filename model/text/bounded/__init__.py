"""Keeps foreign tokenizers within limits of time and memory."""

"""Limits of what is served at once."""

"""Flags: the parser with its help and error messages, the flags of the settings, and types of values."""

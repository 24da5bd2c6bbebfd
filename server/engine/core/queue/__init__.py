"""The sequences that wait and those that run."""

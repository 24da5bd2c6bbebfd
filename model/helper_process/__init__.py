"""Processes that do bounded tasks for this one, may be killed at any time, and end with it."""

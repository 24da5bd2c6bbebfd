"""Attacks on a running service: hostile and excessive requests, and whether the service keeps serving."""

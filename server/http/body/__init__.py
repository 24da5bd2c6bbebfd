"""Reads and checks request bodies."""

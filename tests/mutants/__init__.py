"""Mutation testing: which mistakes in critical code no test would notice."""

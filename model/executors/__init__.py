"""Executors: the ways to compute a step of a network, and the table that chooses among them."""

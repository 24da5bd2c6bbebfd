"""The engine process, its ranks, and what watches them."""

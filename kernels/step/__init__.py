"""A decode step of one sequence in a single launch."""

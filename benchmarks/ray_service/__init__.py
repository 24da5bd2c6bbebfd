"""Measures what clients of two replicas on Ray Serve notice of faults and changes."""

"""Linear layers: which kernel multiplies, and its launch."""

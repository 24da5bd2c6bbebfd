"""Linear layers: kernel selection, launches and the kernels."""

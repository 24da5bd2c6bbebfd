"""What a model does on a processor: its kernels and the least time of its steps."""

"""Attention in PyTorch: the kernels for the CPU and the fallback for every GPU."""

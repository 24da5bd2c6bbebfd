"""Attention in PyTorch: the kernels of the CPU and the fallback of every GPU."""

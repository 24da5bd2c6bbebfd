"""Attention for training, as a library: differentiable functions, masks, and the interfaces of other libraries."""

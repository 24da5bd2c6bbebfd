"""Sublayers beside mixer and MLP, bound to the kernels that compute them."""

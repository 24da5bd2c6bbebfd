"""Sampling parameters and the samplers of the host and of the device."""

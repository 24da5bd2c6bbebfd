"""Sampling parameters, and samplers for the host and for the device."""

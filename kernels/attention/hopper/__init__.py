"""Attention in Gluon for Hopper, with WGMMA and TMA."""

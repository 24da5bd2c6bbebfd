"""Attention in Gluon for Hopper's tensor cores and bulk copies."""

"""Training attention for Hopper GPUs, in Gluon."""

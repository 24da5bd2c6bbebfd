"""Layers with a state of fixed size: gated delta rule, Mamba-2 and gated short convolution, between their products."""

"""Linear layers in Triton and Gluon."""

"""The single-launch decode step in Gluon."""

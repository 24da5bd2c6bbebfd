"""Device code and launch helpers that every kernel family uses."""

"""Front-end processes of `tessera serve`."""

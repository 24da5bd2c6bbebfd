"""The models on this machine: the commands `list`, `pull` and `rm`."""

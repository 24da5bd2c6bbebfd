"""Families of models: what the config.json of each means as a network, and how its checkpoints store the parameters."""

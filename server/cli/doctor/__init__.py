"""`tessera doctor`: checks whether this machine can run the service."""

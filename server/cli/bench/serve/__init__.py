"""`tessera bench serve`: loads a running service over HTTP."""

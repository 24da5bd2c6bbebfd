"""`tessera bench serve`: measures a running server over HTTP."""

"""`tessera bench`: measures a server over HTTP, and the engine without it. The service imports nothing of it."""

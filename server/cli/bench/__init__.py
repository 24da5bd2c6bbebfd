"""`tessera bench`: measures a server over HTTP, or the engine without HTTP. The service imports none of it."""

"""`tessera bench`: measures a server over HTTP, or the engine without HTTP. The service does not import it."""

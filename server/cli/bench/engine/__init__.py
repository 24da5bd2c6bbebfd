"""`tessera bench engine`: measures the engine without HTTP."""

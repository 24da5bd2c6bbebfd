"""The front end's side of the engines: clients, groups of engines, and the hub between several front ends."""

"""Processes and sockets between the engine and its front ends."""

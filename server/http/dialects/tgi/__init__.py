"""The wire format: what requests and replies look like, and which values are allowed.

Knows no sockets.
"""

"""The service: command line, HTTP, engine."""

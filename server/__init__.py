"""The service: command line, HTTP layer and engine."""

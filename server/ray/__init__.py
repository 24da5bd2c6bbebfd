"""The service as a Ray Serve application."""

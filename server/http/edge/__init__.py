"""What every request passes before it reaches a route: its id, the access log, CORS and the API keys."""

"""What every request passes before it reaches a route: id, access log, host, CORS, origin and API keys."""

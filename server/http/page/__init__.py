"""The page for browsers at `GET /`: its assets and the routes that serve them."""

"""The HTTP client of `tessera chat`, `tessera complete` and `tessera bench serve`, and the first two commands."""

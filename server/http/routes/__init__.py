"""One module for each group of routes; each adds its own to the app."""

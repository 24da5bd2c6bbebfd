"""Real clients against a service with the bundled model: one scenario for each, run by `python -m tests.clients`."""

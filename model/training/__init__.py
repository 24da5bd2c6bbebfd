"""The recipe of the bundled model. Serving imports none of it."""

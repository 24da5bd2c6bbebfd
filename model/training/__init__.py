"""The training recipe of the bundled model. Serving does not import this package."""

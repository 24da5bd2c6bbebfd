"""The recipe that made the bundled model. Nothing here is imported while serving."""

"""The adapters that requests may choose: the table of their names, and the routes that change it."""

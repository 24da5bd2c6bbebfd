"""The kernel plan of a model in words, and the roofline of a processor."""

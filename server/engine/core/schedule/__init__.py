"""Which tokens of which sequences a step computes."""

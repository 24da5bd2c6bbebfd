"""References in float32 and float64, generated problems, and the tolerance rule."""

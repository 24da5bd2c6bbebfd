"""The executor of every network and processor: computes a step layer by layer."""

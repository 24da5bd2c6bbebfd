"""Steps of a decoder on a CPU with quantized weights, in C: one call computes a step on all layers."""

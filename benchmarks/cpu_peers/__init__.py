"""Compares Tessera on a CPU with llama.cpp and `transformers`, alternately on the same cores."""

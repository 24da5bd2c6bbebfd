"""Checkpoints in GGUF, the format of llama.cpp: one file that has the configuration, the tokenizer and the weights.

A GGUF file stands for a checkpoint's folder. `files` has what the files of such a folder would contain, so that
whatever reads a checkpoint reads both (docs/decisions/0065-gguf.md).
"""

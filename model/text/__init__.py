"""Tokenizer, detokenizer and stop strings."""

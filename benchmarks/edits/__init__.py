"""Measures drafts on edits of Python files, on text without repetition and on JSON: with drafts and without."""

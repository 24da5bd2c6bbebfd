"""Wire formats, one folder each."""

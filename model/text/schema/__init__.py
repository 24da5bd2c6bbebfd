"""JSON schemas of any draft: read, reduced to what a grammar can enforce, and values checked against them."""

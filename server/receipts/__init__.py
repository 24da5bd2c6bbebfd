"""Receipts: what a reply was computed from and by, so that it can be computed again."""

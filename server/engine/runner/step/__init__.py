"""Packs, computes, records and samples a step."""

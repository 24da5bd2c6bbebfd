"""Recurrent mixers in Triton."""

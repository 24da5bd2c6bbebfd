"""Reads the files of a checkpoint's folder: shards, pickles, headers and the files beside them."""

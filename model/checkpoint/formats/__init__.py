"""The formats in which checkpoints store the matrices of their layers, one file each, and the table of them."""

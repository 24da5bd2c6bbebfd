"""Attention in Gluon for Blackwell's data-centre GPUs, with tcgen05, tensor memory and TMA. It has never run."""

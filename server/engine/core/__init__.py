"""Request bookkeeping: scheduler, blocks and sequences, without tensors."""

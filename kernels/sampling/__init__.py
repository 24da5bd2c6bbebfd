"""Token sampling and the embedding of sampled tokens."""

"""`tessera size`: what fits on a GPU, and how fast it is at best."""

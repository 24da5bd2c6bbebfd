"""Token sampling in Triton."""

"""Recurrent mixers as operations of PyTorch: on every device, in float32, differentiable for whole sequences."""

"""The decoder: layers, attention, rotary embedding and its forward pass."""

"""The decoder: its layers, attention, rotary embedding and forward pass."""

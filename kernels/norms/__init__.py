"""RMS norm, gated activation and rotary embedding."""

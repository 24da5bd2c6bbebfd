"""RMS norm, gated activation and quantization of rows in Triton."""

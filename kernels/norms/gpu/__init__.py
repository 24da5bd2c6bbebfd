"""RMS norm, gated activation, output gate and quantization of rows in Triton."""

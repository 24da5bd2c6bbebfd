"""The Triton kernels of the gated delta rule, in the interpreter, against the formula."""

"""The elementwise ops between attention and linears, reached only through `kernels/__init__.py`."""

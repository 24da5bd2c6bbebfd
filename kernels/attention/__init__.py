"""Attention: the problem, the selection of a kernel, and the kernels. Other packages import it from `kernels`."""

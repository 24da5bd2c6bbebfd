"""Attention: the problem, the choice of a kernel, and the kernels. Other packages import it from `kernels`."""

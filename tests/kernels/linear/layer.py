"""Computes a linear layer with a given kernel, and the norm and gate around it, as a projection does."""

from kernels.linear.weights import LinearArguments
from kernels.norms.gpu import norm_and_gate
from kernels.selection import load
from tests.kernels.linear.weights import linear_weights


def linear(
    x, weight, choice, out=None, *,
    bias=None, scale=None, norm=None, residual=None, best=None, pdl=False,
):  # fmt: skip
    """Compute the layer; norm and gate are separate launches where the product does not absorb them."""
    spec, gated = choice.spec, choice.problem.gated
    product = load(spec.target)(linear_weights(weight, bias, scale), choice.problem)
    if norm is not None and not spec.absorbs_norm:
        x, norm = norm_and_gate.add_rms_norm(x, *norm, pdl=pdl), None
    apart = gated and not spec.absorbs_gate
    arguments = LinearArguments(norm, residual, best, pdl)
    y = product(x, choice, None if apart else out, arguments)
    return norm_and_gate.silu_and_mul(y, out=out, pdl=pdl) if apart else y

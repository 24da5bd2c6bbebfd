"""An optimizer that uses Muon for matrices and AdamW for all other parameters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from kernels.torch_private import add_all, multiply_all

_COEFFICIENTS = (3.4445, -4.7750, 2.0315)
_ITERATIONS = 5


def orthogonalize(matrices: Tensor) -> Tensor:
    """Replace the singular values of each matrix by values near one.

    Args:
        matrices: [N, R, C], any float dtype.

    Returns:
        [N, R, C] bfloat16 on CUDA, float32 elsewhere.

    Source: Jordan et al. 2024, "Muon"; its quintic Newton-Schulz iteration and coefficients.
    """
    a, b, c = _COEFFICIENTS
    x = matrices.to(torch.bfloat16 if matrices.is_cuda else torch.float32)
    tall = x.shape[-2] > x.shape[-1]
    if tall:
        x = x.mT
    norms: Tensor = torch.linalg.matrix_norm(x, keepdim=True)
    x = x / (norms + 1e-7)
    for _ in range(_ITERATIONS):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    return x.mT if tall else x


class MuonAdamW:
    """Owns the optimizer state; `step` changes the parameters in place.

    Muon updates the matrices of the layers, batched by shape; AdamW updates the embedding and the norms. Weight decay
    is decoupled and does not apply to the norms. A Muon update is scaled to the size of an AdamW update, so that both
    share one learning rate (Source: Liu et al. 2025, "Muon is scalable for LLM training", section 2.2).
    """

    def __init__(
        self,
        named_parameters: Iterable[tuple[str, nn.Parameter]],
        weight_decay: float,
        momentum: float = 0.95,
        embedding_rate: float = 1.0,
    ) -> None:
        shapes: dict[tuple[int, ...], list[nn.Parameter]] = {}
        self._decayed: list[nn.Parameter] = []
        plain: list[nn.Parameter] = []
        for name, parameter in named_parameters:
            if parameter.ndim == 2 and "embed" not in name:
                shapes.setdefault(parameter.shape, []).append(parameter)
            elif parameter.ndim == 2:
                self._decayed.append(parameter)
            else:
                plain.append(parameter)
        self._groups = list(shapes.values())
        self._momentum = momentum
        self._weight_decay = weight_decay
        self._embedding_rate = embedding_rate
        self._buffers = [torch.zeros_like(torch.stack(list(group))) for group in self._groups]
        self._adam = torch.optim.AdamW(
            [
                {"params": self._decayed, "weight_decay": weight_decay},
                {"params": plain, "weight_decay": 0.0},
            ],
            lr=0.0,
            betas=(0.9, 0.95),
            fused=bool(plain) and plain[0].is_cuda,
        )

    @torch.no_grad()
    def step(self, learning_rate: float) -> None:
        """Apply one update from the parameters' gradients and clear them."""
        for group in self._adam.param_groups:
            group["lr"] = learning_rate * self._embedding_rate
        self._adam.step()
        self._adam.zero_grad(set_to_none=True)
        for parameters, buffer in zip(self._groups, self._buffers, strict=True):
            gradient = torch.stack([_gradient(parameter) for parameter in parameters])
            buffer.lerp_(gradient, 1 - self._momentum)
            update = orthogonalize(gradient.lerp_(buffer, self._momentum))
            scale = 0.2 * max(buffer.shape[1:]) ** 0.5
            changes = update.to(buffer.dtype).unbind(0)
            multiply_all(parameters, 1 - learning_rate * self._weight_decay)
            add_all(parameters, changes, -learning_rate * scale)
            for parameter in parameters:
                parameter.grad = None

    def state_dict(self) -> dict[str, Any]:
        """Return the state for `load_state_dict`."""
        return {"muon": self._buffers, "adam": self._adam.state_dict()}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from `state_dict` of an optimizer over the same parameters."""
        for buffer, saved in zip(self._buffers, state["muon"], strict=True):
            buffer.copy_(saved)
        self._adam.load_state_dict(state["adam"])


def _gradient(parameter: nn.Parameter) -> Tensor:
    assert parameter.grad is not None
    return parameter.grad

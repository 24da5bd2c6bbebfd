"""Attention over several processes, each with a part of every sequence: keys and values travel in a ring.

Each of N ranks has queries, keys and values of its part. In N rounds it attends to the keys of one rank after the
other, while the next ones arrive; partial results are merged by their log-sum-exps. In the backward the gradients of
keys and values travel with them.

With a causal mask a rank with the first tokens would have nothing to do in most rounds. So a sequence is cut into 2 N
chunks, and rank r has chunks r and 2 N - 1 - r (zigzag): in each round every rank then computes half of a square.

    round 0, own keys              causal, as in one sequence
    keys of an earlier rank        all queries see the first half of the keys
    keys of a later rank           the second half of the queries sees all keys

Source: Liu et al., "Ring Attention with Blockwise Transformers", 2023; the zigzag is from Zhu, "ring-flash-attention".
"""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING, Any, NamedTuple

import torch
from torch import Tensor, distributed

from kernels.arch import detect
from kernels.attention.checks import describe
from kernels.attention.training.registry import TrainingBatch, TrainingProblem, select_training
from kernels.errors import ShapeError
from kernels.selection import load

if TYPE_CHECKING:
    from collections.abc import Sequence

    from torch.distributed import ProcessGroup

    from kernels.attention.training.registry import TrainingKernel


def zigzag_split(x: Tensor, rank: int, size: int, dim: int = 1) -> Tensor:
    """Return a rank's part of a tensor for `ring_attention`.

    Args:
        x: the whole; `dim` has a multiple of 2 * size elements.
        rank: 0 to size - 1.
        size: number of ranks.
        dim: the tokens.

    Raises:
        ShapeError: the tokens cannot be divided.
    """
    if x.shape[dim] % (2 * size):
        raise ShapeError(f"{x.shape[dim]} tokens cannot be divided into 2 * {size} chunks")
    chunks = x.chunk(2 * size, dim)
    return torch.cat([chunks[rank], chunks[2 * size - 1 - rank]], dim)


def zigzag_join(parts: Sequence[Tensor], dim: int = 1) -> Tensor:
    """Return the whole tensor from the parts of all ranks, in their order."""
    halves = [part.chunk(2, dim) for part in parts]
    return torch.cat(
        [*(first for first, _ in halves), *(last for _, last in reversed(halves))], dim
    )


def ring_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    softmax_scale: float | None = None,
    *,
    causal: bool = True,
    softcap: float | None = None,
    group: ProcessGroup | None = None,
) -> Tensor:
    """Compute attention of sequences that are divided among ranks, differentiably.

    All ranks of the group call it together. Dimensions: B sequences, S tokens of a rank's part, H query heads, K
    key-value heads, D head dim.

    Args:
        q: [B, S, H, D], this rank's part; with `causal` from `zigzag_split`.
        k: [B, S, K, D], likewise.
        v: [B, S, K, D], likewise.
        softmax_scale: factor on the scores; None for 1 / sqrt(D).
        causal: whether a query sees no later keys.
        softcap: c in c * tanh(score / c); None for none.
        group: the ranks; None for all.

    Returns:
        [B, S, H, D], this rank's part of the result.

    Raises:
        ShapeError: the shapes do not fit each other.

    Example:
        >>> from torch import distributed
        >>> distributed.init_process_group("gloo", store=distributed.HashStore(), rank=0, world_size=1)
        >>> q, k, v = torch.randn(3, 2, 64, 8, 32)  # this rank's part
        >>> ring_attention(q, k, v).shape
        torch.Size([2, 64, 8, 32])
        >>> distributed.destroy_process_group()
    """
    fits = q.ndim == 4 and k.shape == v.shape and q.shape[:2] == k.shape[:2]
    if not fits or q.shape[3] != k.shape[3] or q.shape[2] % k.shape[2] or q.shape[1] % 2:
        raise ShapeError(
            f"q is {describe(q)}, k is {describe(k)}, v is {describe(v)}; expected q [B, S, H, D], k and v "
            "[B, S, K, D], H a multiple of K, S even"
        )
    scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
    problem = TrainingProblem(softmax_scale=scale, causal=causal, softcap=softcap)
    out: Tensor = _RingAttention.apply(q, k, v, problem, _Ring(group))  # type: ignore[no-untyped-call]
    return out


def sent_bytes(k: Tensor, size: int, *, backward: bool = False) -> int:
    """Return the bytes that each rank sends in a call.

    Args:
        k: a rank's keys; the values are as many.
        size: number of ranks.
        backward: whether of the backward, in which float32 gradients travel one round more than keys and values.
    """
    gradients = 2 * k.numel() * 4 * size if backward and size > 1 else 0
    return 2 * k.nbytes * (size - 1) + gradients


class _Ring:
    """The ranks, in a ring; counts the bytes that this one sends."""

    def __init__(self, group: ProcessGroup | None) -> None:
        self._group = group
        self.rank, self.size = distributed.get_rank(group), distributed.get_world_size(group)
        self.num_bytes = 0
        self._work: list[Any] = []
        self._arriving: list[Tensor] = []

    def pass_on(self, tensors: Sequence[Tensor]) -> None:
        """Start to send tensors to the next rank, and to receive as many from the one before."""
        tensors = [it.contiguous() for it in tensors]
        self.num_bytes += sum(it.nbytes for it in tensors)
        self._arriving = [torch.empty_like(it) for it in tensors]
        operations = []
        for sent, arriving in zip(tensors, self._arriving, strict=True):
            operations.append(self._operation(distributed.isend, sent, self.rank + 1))
            operations.append(self._operation(distributed.irecv, arriving, self.rank - 1))
        self._work = distributed.batch_isend_irecv(operations)

    def arrived(self) -> list[Tensor]:
        """Wait for what the rank before sent."""
        for work in self._work:
            work.wait()
        return self._arriving

    def _operation(self, kind: Any, tensor: Tensor, rank: int) -> distributed.P2POp:
        return distributed.P2POp(kind, tensor, group=self._group, group_peer=rank % self.size)


class _Part(NamedTuple):
    """What a rank computes in a round: some of its queries with some of the keys that it has.

    Attributes:
        queries: tokens of the queries.
        keys: tokens of the keys.
        problem: how they attend.
    """

    queries: slice
    keys: slice
    problem: TrainingProblem


def _part(ring: _Ring, source: int, length: int, problem: TrainingProblem) -> _Part:
    """Return what to compute with the keys of rank `source`."""
    queries = keys = slice(0, length)
    if problem.causal and source < ring.rank:
        keys = slice(0, length // 2)
    elif problem.causal and source > ring.rank:
        queries = slice(length // 2, length)
    return _Part(
        queries,
        keys,
        dataclasses.replace(
            problem,
            causal=problem.causal and source == ring.rank,
            max_seqlen_q=queries.stop - queries.start,
            max_seqlen_k=keys.stop - keys.start,
        ),
    )


def _batch(x: Tensor, problem: TrainingProblem) -> TrainingBatch:
    steps = torch.arange(len(x) + 1, dtype=torch.int32, device=x.device)
    return TrainingBatch(steps * problem.max_seqlen_q, steps * problem.max_seqlen_k)


def _rows(x: Tensor, tokens: slice) -> Tensor:
    return x[:, tokens].flatten(0, 1).contiguous()


def _kernel(q: Tensor, k: Tensor, batch: TrainingBatch, problem: TrainingProblem) -> TrainingKernel:
    kernel: TrainingKernel = load(select_training(q, k, batch, problem, detect(q.device)).target)
    return kernel


class _RingAttention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, problem: TrainingProblem, ring: _Ring
    ) -> Tensor:
        out = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        lse = torch.full(q.shape[:3], -torch.inf, device=q.device)
        length, own = q.shape[1], (k, v)
        for step in range(ring.size):
            if step + 1 < ring.size:
                ring.pass_on((k, v))
            part = _part(ring, (ring.rank - step) % ring.size, length, problem)
            mine, batch = _rows(q, part.queries), _batch(q, part.problem)
            theirs = [_rows(it, part.keys) for it in (k, v)]
            kernel = _kernel(mine, theirs[0], batch, part.problem)
            found, sums = kernel.forward(mine, theirs[0], theirs[1], batch, part.problem)
            shape = (len(q), part.problem.max_seqlen_q, *q.shape[2:])
            _merge(
                out[:, part.queries], lse[:, part.queries], found.view(shape), sums.view(shape[:3])
            )
            if step + 1 < ring.size:
                k, v = ring.arrived()
        result = out.to(q.dtype)
        ctx.save_for_backward(q, *own, result, lse)
        ctx.problem, ctx.ring = problem, ring
        return result

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:
        q, k, v, out, lse = ctx.saved_tensors
        problem, ring, (dout,) = ctx.problem, ctx.ring, grads
        length, shape = q.shape[1], k.shape
        dq = torch.zeros(q.shape, dtype=torch.float32, device=q.device)
        dk, dv = (torch.zeros(shape, dtype=torch.float32, device=q.device) for _ in range(2))
        for step in range(ring.size):
            part = _part(ring, (ring.rank - step) % ring.size, length, problem)
            mine = [_rows(it, part.queries) for it in (q, dout, out, lse)]
            theirs = [_rows(it, part.keys) for it in (k, v)]
            batch = _batch(q, part.problem)
            more = _kernel(mine[0], theirs[0], batch, part.problem).backward(
                (mine[1], torch.zeros_like(mine[3])),
                (mine[0], theirs[0], theirs[1], mine[2], mine[3]),
                batch,
                part.problem,
            )
            for total, tokens, found in zip(
                (dq, dk, dv), (part.queries, part.keys, part.keys), more, strict=True
            ):
                total[:, tokens] += found.view(len(q), -1, *total.shape[2:])
            if ring.size == 1:
                break
            # In the last round only the gradients travel on, to the rank that they belong to.
            travels = (dk, dv) if step + 1 == ring.size else (k, v, dk, dv)
            ring.pass_on(travels)
            arrived = ring.arrived()
            k, v = arrived[:-2] or (k, v)
            dk, dv = arrived[-2:]
        return dq.to(q.dtype), dk.to(q.dtype), dv.to(q.dtype), None, None


def _merge(out: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor) -> None:
    """Merge partial results in place.

    Args:
        out: [B, S, H, D] float32.
        lse: [B, S, H] float32.
        more: [B, S, H, D], to be merged into `out`.
        more_lse: [B, S, H].
    """
    total = torch.logaddexp(lse, more_lse)
    safe = total.masked_fill(total == -torch.inf, 0.0)
    out.mul_((lse - safe).exp()[..., None]).add_(more * (more_lse - safe).exp()[..., None])
    lse.copy_(total)

"""Selects the attention kernel for a problem on a processor, and records why each preferred row was passed over."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import dataclass
from typing import TYPE_CHECKING

from kernels.attention.problem import AttentionProblem, PackedBatch, PagedBatch, Phase
from kernels.attention.registry import INVARIANT_REGISTRY, REGISTRY
from kernels.attention.tuned import tuned_launches
from kernels.errors import NoKernelError
from kernels.selection import Refusal, choose

if TYPE_CHECKING:
    from collections.abc import Callable, Sequence

    from kernels.arch import GPUArch
    from kernels.attention.launch import LaunchConfig, TunedLaunch
    from kernels.attention.spec import KernelSpec


@dataclass(frozen=True, slots=True)
class Selection:
    """The row chosen for a problem, and why.

    Attributes:
        spec: the row.
        arch: the processor it was chosen for.
        launches: its tile sizes in order of preference: those for more sequences first, then those for shorter
            ones; empty for a PyTorch row.
        why: the reason for the choice, one sentence.
        refusals: the more preferred rows of this phase, with their reasons.
    """

    spec: KernelSpec
    arch: GPUArch
    launches: tuple[TunedLaunch, ...]
    why: str
    refusals: tuple[Refusal, ...]

    def launch_for(self, max_seqlen_k: int, num_seqs: int) -> LaunchConfig:
        """Return the tile sizes for a step of `num_seqs` sequences of at most `max_seqlen_k` keys."""
        for row in self.launches:
            long_enough = row.max_seqlen_k is None or max_seqlen_k <= row.max_seqlen_k
            if long_enough and num_seqs >= row.min_num_seqs:
                return row.launch
        raise AssertionError(f"{self.spec.name} has no launch for {max_seqlen_k} keys")


def select_for(
    selection: Selection, problem: AttentionProblem, batch: PagedBatch | PackedBatch
) -> Selection:
    """Return the row for a step: the selected one, or the next one that supports the problem if that one is unsuited.

    Args:
        selection: from `select`, for the problem.
        problem: the problem.
        batch: the step's sequences.
    """
    passed: tuple[str, ...] = ()
    found = selection
    while found.spec.unsuited(problem, batch):
        passed += (found.spec.name,)
        following = _without(problem, selection.arch, passed)
        if following is None or following.spec.launch is None:
            return selection  # PyTorch's rows are slower, and cannot be recorded
        found = following
    return found


@functools.lru_cache(maxsize=256)
def _without(problem: AttentionProblem, arch: GPUArch, passed: tuple[str, ...]) -> Selection | None:
    """Select among the rows that are not named; None if none supports the problem."""
    try:
        return select(problem, arch, tuple(row for row in REGISTRY if row.name not in passed))
    except NoKernelError:
        return None


def _for_many_long_sequences(
    problem: AttentionProblem, arch: GPUArch, registry: Sequence[KernelSpec]
) -> str:
    """Name the row that `select_for` takes for a step whose keys are too many to copy; empty if there is none."""
    for row in registry:
        if row.launch and not row.copied_bytes and not row.unsupported(problem, arch):
            return f"; for many long sequences {row.name}"
    return ""


def select(
    problem: AttentionProblem,
    arch: GPUArch,
    registry: Sequence[KernelSpec] | None = None,
    launches: Callable[
        [KernelSpec, AttentionProblem, GPUArch], tuple[TunedLaunch, ...]
    ] = tuned_launches,
) -> Selection:
    """Choose the first row that supports the problem. Accesses no device, so `arch` may be an absent GPU.

    Args:
        problem: the problem to solve.
        arch: from `detect()` or `kernels.arch.CATALOGUE`.
        registry: rows, most preferred first; None for those of the package.
        launches: returns a row's tile sizes, in the order of `Selection.launches`.

    Raises:
        NoKernelError: no row supports it; the message has the reasons of every row of the problem's phase.
    """
    if registry is None:
        registry = INVARIANT_REGISTRY if problem.batch_invariant else REGISTRY
    rows = [row for row in registry if row.phase is problem.phase]
    spec, why, refusals = choose(rows, lambda row: row.unsupported(problem, arch), problem, arch)
    if spec.copied_bytes:
        why += _for_many_long_sequences(problem, arch, rows[len(refusals) + 1 :])
    return Selection(
        spec, arch, launches(spec, problem, arch) if spec.launch else (), why, refusals
    )


def select_for_queries(problem: AttentionProblem, arch: GPUArch) -> Selection:
    """Select as `select`; if no decode row takes several query tokens per sequence, among the rows of prefill.

    These take any number of them, but read the keys in fewer parts. The refusals then begin with those of all decode
    rows.

    Raises:
        NoKernelError: no row supports it.
    """
    try:
        return select(problem, arch)
    except NoKernelError:
        if problem.phase is Phase.PREFILL or problem.max_query_tokens == 1:
            raise
    found = select(dataclasses.replace(problem, phase=Phase.PREFILL), arch)
    rows = INVARIANT_REGISTRY if problem.batch_invariant else REGISTRY
    passed = tuple(
        Refusal(row.name, row.unsupported(problem, arch))
        for row in rows
        if row.phase is problem.phase
    )
    count = problem.max_query_tokens
    why = f"no decode row takes {count} query tokens per sequence here; {found.why}"
    return dataclasses.replace(found, why=why, refusals=(*passed, *found.refusals))

"""The plan: the records that the engine sends and `GET /plan` and `tessera plan` show.

The fields are in the order of the reply. This module imports no kernels, so that the front end can import it.
"""

from __future__ import annotations

from typing import Literal

import msgspec


class RefusedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A more preferred kernel or executor that does not support the problem, with every reason."""

    kernel: str
    reasons: list[str]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Tile sizes of a kernel, the steps they are for, and where they come from.

    A step takes the first entry that fits it: `min_num_seqs` or more sequences of at most `max_seqlen_k` tokens each
    (None: any length).
    """

    min_num_seqs: int
    max_seqlen_k: int | None
    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    programs_per_sm: int
    provenance: str
    measured: bool


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of one phase and kind of layer.

    `flash_attention` is the FlashAttention generation whose algorithm the kernel follows, None for PyTorch's attention.
    `tested` tells whether the tests have run this kernel on a processor of this architecture. `softcap` is the model's
    cap of attention scores.
    """

    phase: str
    sliding_window: int | None
    softcap: float | None = None
    kernel: str
    flash_attention: int | None
    tested: bool
    why: str
    refused: list[RefusedRow]
    launches: list[LaunchPlan]


class OperationPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of one operation of a step; `measured` tells whether timings on this architecture decided."""

    operation: str
    kernel: str
    why: str
    measured: bool
    refused: list[RefusedRow]


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How one kind of step is computed: `decode_rows` sequences with a token each, or `prompt_tokens` of one prompt.

    `operations` are those with a kernel of their own; an executor may compute all others in one launch or call.
    """

    step: str
    decode_rows: int
    prompt_tokens: int
    executor: str
    why: str
    refused: list[RefusedRow]
    operations: list[OperationPlan]


class MemoryPlan(msgspec.Struct, frozen=True, kw_only=True):
    """The memory that a model needs, besides the activations of a step.

    `weight_bytes` is None where the weights are packed for the C library. `kv_bytes_per_token` are the keys and values
    of a token in all layers, with their scales. `max_context` is the model's limit of tokens in a sequence.
    `state_bytes_per_sequence` are those of states of fixed size, 0 if no layer has one. `state_snapshots` are the slots
    for such states that the prefix cache of a running engine has beside those of the running sequences.
    """

    weight_bytes: int | None
    kv_bytes_per_token: int
    max_context: int
    state_bytes_per_sequence: int = 0
    state_snapshots: int = 0


class DeterminismPlan(msgspec.Struct, frozen=True, kw_only=True):
    """Which requests are deterministic, and by which kernels; for "none", why a request that asks for it is refused."""

    requests: Literal["all", "on request", "none"]
    why: str


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """How a processor computes a model; constant while the engine runs.

    `num_engines` is the number of engines that run it, each on processors of its own. With `num_ranks` above 1, several
    processors share the model, and the plan is that of one: its heads, its part of the weights and of the cache.
    `adapters` is a decode step of one sequence with an adapter; None if the engine takes none.

    Example:
        >>> plan = client.plan()
        >>> {phase.phase: phase.why for phase in plan.phases}["decode"] != ""
        True
    """

    arch: str
    arch_name: str
    sm: int
    num_sms: int
    shared_memory_bytes: int
    memory_bandwidth_gbs: int
    peak_tflops: float
    dtype: str
    weight_dtype: str
    kv_dtype: str
    num_heads: int
    num_kv_heads: int
    head_dim: int
    block_size: int | None
    memory: MemoryPlan
    one_sequence: str
    phases: list[PhasePlan]
    steps: list[StepPlan]
    deterministic: DeterminismPlan
    num_engines: int = 1
    num_ranks: int = 1
    adapters: StepPlan | None = None

    def __str__(self) -> str:
        """Return one line for the log."""
        chosen = ", ".join(
            f"{plan.phase} by {plan.kernel}"
            + (f" (window {plan.sliding_window})" if plan.sliding_window else "")
            for plan in self.phases
        )
        untested = "" if all(plan.tested for plan in self.phases) else f"; {self.untested}"
        return f"attention on {self.arch_name}: {chosen}{untested}"

    @property
    def untested(self) -> str:
        """What to say of a kernel whose `tested` is False."""
        return f"never run here: no GPU of this architecture (sm_{self.sm}) has ever run it"

"""The attention plan as the engine reports it and `GET /plan` shows it: records, field by field in wire order.

What `kernels.explain.plan` says, in a form that crosses to the front end, which imports no kernels.
"""

from __future__ import annotations

import msgspec


class RefusedRow(msgspec.Struct, frozen=True, kw_only=True):
    """A more preferred kernel that was passed over, with every reason."""

    kernel: str
    reasons: list[str]


class LaunchPlan(msgspec.Struct, frozen=True, kw_only=True):
    """How a kernel is launched for a step, and where those numbers come from."""

    block_m: int
    block_n: int
    num_warps: int
    num_stages: int
    num_programs: int
    num_kv_splits: int | None
    provenance: str
    measured: bool


class StepPlan(msgspec.Struct, frozen=True, kw_only=True):
    """One step size: its launch, and the least that it costs in one layer."""

    num_seqs: int
    query_tokens: int
    context: int
    launch: LaunchPlan | None
    bytes_moved: int
    flops: int
    flops_per_byte: float
    roofline_us: float | None
    bound: str | None


class PhasePlan(msgspec.Struct, frozen=True, kw_only=True):
    """The kernel of one phase, for one kind of layer, and why."""

    phase: str
    sliding_window: int | None
    kernel: str
    why: str
    refused: list[RefusedRow]
    steps: list[StepPlan]


class PlanReport(msgspec.Struct, frozen=True, kw_only=True):
    """The attention kernels of a model on a processor; constant while the engine runs."""

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
    one_sequence: str
    phases: list[PhasePlan]

    def __str__(self) -> str:
        """One line for the log."""
        chosen = ", ".join(
            f"{plan.phase} by {plan.kernel}"
            + (f" (window {plan.sliding_window})" if plan.sliding_window else "")
            for plan in self.phases
        )
        return f"attention on {self.arch_name}: {chosen}"

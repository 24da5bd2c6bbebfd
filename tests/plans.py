"""An attention plan for tests whose engine has no model."""

from __future__ import annotations

from server.engine.link.plan_report import LaunchPlan, PhasePlan, PlanReport, RefusedRow, StepPlan

_STEP = StepPlan(
    num_seqs=8,
    query_tokens=1,
    context=128,
    launch=LaunchPlan(
        block_m=16,
        block_n=64,
        num_warps=4,
        num_stages=3,
        num_programs=16,
        num_kv_splits=1,
        provenance="a test",
        measured=False,
    ),
    bytes_moved=1000,
    flops=2000,
    flops_per_byte=2.0,
    roofline_us=0.5,
    bound="memory",
)
PLAN = PlanReport(
    arch="h100",
    arch_name="NVIDIA H100",
    sm=90,
    num_sms=132,
    shared_memory_bytes=232448,
    memory_bandwidth_gbs=3352,
    peak_tflops=989.4,
    dtype="bfloat16",
    weight_dtype="bfloat16",
    kv_dtype="bfloat16",
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    block_size=16,
    one_sequence="in one launch",
    phases=[
        PhasePlan(
            phase="prefill",
            sliding_window=None,
            kernel="torch_prefill",
            why="a test",
            refused=[RefusedRow(kernel="portable_prefill", reasons=["no head_dim 7"])],
            steps=[],
        ),
        PhasePlan(
            phase="decode",
            sliding_window=None,
            kernel="portable_decode",
            why="a test",
            refused=[],
            steps=[_STEP],
        ),
        PhasePlan(
            phase="decode",
            sliding_window=4096,
            kernel="portable_decode",
            why="a test",
            refused=[],
            steps=[_STEP],
        ),
    ],
)

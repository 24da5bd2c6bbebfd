"""A plan report for tests whose engine has no model."""

from __future__ import annotations

from server.engine.core.plan_report import (
    DeterminismPlan,
    LaunchPlan,
    MemoryPlan,
    OperationPlan,
    PhasePlan,
    PlanReport,
    RefusedRow,
    StepPlan,
)

_LAUNCH = LaunchPlan(
    min_num_seqs=0,
    max_seqlen_k=None,
    block_m=16,
    block_n=64,
    num_warps=4,
    num_stages=3,
    programs_per_sm=1,
    provenance="a test",
    measured=False,
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
    memory=MemoryPlan(weight_bytes=3 * 2**30, kv_bytes_per_token=32 * 2**10, max_context=65536),
    one_sequence="in one launch",
    deterministic=DeterminismPlan(requests="on request", why="a test"),
    steps=[
        StepPlan(
            step="decode of 1 sequence",
            decode_rows=1,
            prompt_tokens=0,
            executor="single_launch",
            why="a test",
            refused=[],
            operations=[],
        ),
        StepPlan(
            step="prompt of 1024 tokens",
            decode_rows=0,
            prompt_tokens=1024,
            executor="layers",
            why="a test",
            refused=[RefusedRow(kernel="single_launch", reasons=["one token per sequence"])],
            operations=[
                OperationPlan(
                    operation="gate_up product",
                    kernel="persistent",
                    why="a test",
                    measured=False,
                    refused=[RefusedRow(kernel="vector", reasons=["1024 rows", "odd sizes"])],
                )
            ],
        ),
    ],
    phases=[
        PhasePlan(
            phase="prefill",
            sliding_window=None,
            kernel="torch_prefill",
            flash_attention=None,
            tested=True,
            why="a test",
            refused=[RefusedRow(kernel="portable_prefill", reasons=["no head_dim 7"])],
            launches=[],
        ),
        PhasePlan(
            phase="decode",
            sliding_window=None,
            kernel="portable_decode",
            flash_attention=2,
            tested=True,
            why="a test",
            refused=[],
            launches=[_LAUNCH],
        ),
        PhasePlan(
            phase="decode",
            sliding_window=4096,
            kernel="portable_decode",
            flash_attention=2,
            tested=True,
            why="a test",
            refused=[],
            launches=[_LAUNCH],
        ),
    ],
)

"""Invalid arguments raise an error that names the expected value, before any kernel launches."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels import NoKernelError, ShapeError
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from tests.gpu.attention_cases import DEVICE, make, make_problem


def case_of(phase, **features):
    queries = [1, 1] if phase is Phase.DECODE else [20, 3]
    return make(make_problem(phase, ("bfloat16", 8, 2, 64, 16, features)), queries, [40, 300])


def call(case, **changes):
    plan = kernels.plan_attention(case.problem, case.batch)
    given = {"q": case.q, "kv": case.kv, "out": torch.full_like(case.q, 7.0)} | changes
    run = (
        kernels.decode_attention
        if case.problem.phase is Phase.DECODE
        else kernels.prefill_attention
    )
    try:
        run(given["q"], given["kv"], plan, given["out"], given.get("lse"))
    finally:
        torch.cuda.synchronize()
    return given["out"]


MISTAKES = {
    "one query too many": lambda case: {"q": torch.cat([case.q, case.q[:1]])},
    "another head dim": lambda case: {"q": case.q[..., :32].contiguous()},
    "queries not contiguous in a head": lambda case: {"q": case.q.repeat(1, 1, 2)[..., ::2]},
    "queries of another dtype": lambda case: {"q": case.q.float()},
    "queries on the host": lambda case: {"q": case.q.cpu()},
    "a cache of another dtype": lambda case: {"kv": case.kv.half()},
    "a cache of another block size": lambda case: {"kv": case.kv.repeat(1, 1, 2, 1, 1)},
    "a cache of another number of heads": lambda case: {"kv": case.kv[:, :, :, :1].contiguous()},
    "a cache with heads before tokens": lambda case: {
        "kv": case.kv.transpose(2, 3).contiguous().transpose(2, 3)
    },
    "half a cache": lambda case: {"kv": case.kv[0]},
    "an output with gaps": lambda case: {"out": case.q.repeat(1, 2, 1)[:, ::2]},
    "an output of another dtype": lambda case: {"out": case.q.float()},
    "an unrequested log-sum-exp": lambda case: {
        "lse": torch.empty(case.q.shape[:2], device=DEVICE)
    },
}


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize("mistake", MISTAKES.values(), ids=MISTAKES.keys())
def test_tensors_that_do_not_fit_the_plan_are_refused_before_a_launch(phase, mistake):
    case = case_of(phase)
    out = torch.full_like(case.q, 7.0)

    with pytest.raises(ShapeError):
        call(case, **({"out": out} | mistake(case)))

    assert bool((out == 7.0).all())


@pytest.mark.parametrize(
    "lse",
    [
        lambda q: None,
        lambda q: torch.empty(q.shape[:2], dtype=q.dtype, device=DEVICE),
        lambda q: torch.empty(q.shape[1::-1], device=DEVICE).T,
    ],
    ids=["missing", "dtype", "strides"],
)
def test_a_log_sum_exp_tensor_of_wrong_dtype_or_layout_is_refused(lse):
    case = case_of(Phase.PREFILL, lse=True)

    with pytest.raises(ShapeError, match="lse is"):
        call(case, lse=lse(case.q))


@pytest.mark.parametrize(
    "change",
    [
        {"seq_lens": torch.zeros(2, dtype=torch.int64)},
        {"cu_seqlens_q": torch.zeros(2, dtype=torch.int32)},
        {"block_table": torch.zeros((3, 4), dtype=torch.int32)},
    ],
    ids=["dtype", "offsets", "table"],
)
def test_planning_refuses_an_inconsistent_batch(change):
    case = case_of(Phase.DECODE)
    change = {name: tensor.to(DEVICE) for name, tensor in change.items()}

    with pytest.raises(ShapeError, match="expected"):
        kernels.plan_attention(case.problem, dataclasses.replace(case.batch, **change))


@pytest.mark.parametrize(
    "change",
    [
        lambda k, kv, slots: (k[:, :1], kv, slots),
        lambda k, kv, slots: (k.float(), kv, slots),
        lambda k, kv, slots: (k.repeat(1, 1, 2)[..., ::2], kv, slots),
        lambda k, kv, slots: (k, kv.transpose(2, 3), slots),
        lambda k, kv, slots: (k, kv, slots[:3]),
        lambda k, kv, slots: (k, kv, slots.float()),
    ],
    ids=["heads", "dtype", "strides", "cache strides", "slots", "slot dtype"],
)
def test_a_write_that_does_not_fit_the_cache_is_refused(change):
    k = torch.ones((4, 2, 64), dtype=torch.bfloat16, device=DEVICE)
    kv = torch.zeros((2, 3, 16, 2, 64), dtype=torch.bfloat16, device=DEVICE)
    k, cache, slots = change(k, kv, torch.arange(4, dtype=torch.int32, device=DEVICE))

    with pytest.raises(ShapeError):
        kernels.write_kv(k, k, cache, slots)

    assert not bool(kv.any())


@pytest.mark.parametrize("phase", list(Phase))
@pytest.mark.parametrize(
    ("fields", "reason"),
    [
        ({"head_dim": 72}, "head_dim 72 is not one of"),
        ({"block_size": 512}, "block_size 512 is not from 1 to 256"),
    ],
    ids=["head dim", "block size"],
)
def test_an_unsupported_problem_raises_an_error_with_the_reasons_of_every_row_of_the_phase(
    phase, fields, reason
):
    problem = case_of(phase).problem
    # PyTorch's rows support any size, but write no log-sum-exp.
    problem = dataclasses.replace(problem, lse=True, **fields)
    case = make(problem, [1], [5])

    with pytest.raises(NoKernelError) as raised:
        kernels.plan_attention(problem, case.batch)

    message = str(raised.value)
    assert reason in message
    assert "no log-sum-exp" in message
    assert all(f"{row.name}: " in message for row in REGISTRY if row.phase is phase)


def test_an_unsupported_dtype_is_refused_by_name():
    with pytest.raises(ShapeError, match=r"'float8_e4m3fn'.*one of float32, bfloat16, float16"):
        AttentionProblem(Phase.DECODE, "float8_e4m3fn", 8, 2, 64, 16, 1.0)


def test_a_gpu_uses_our_kernels_and_not_the_pytorch_fallback():
    for phase in Phase:
        case = case_of(phase)
        plan = kernels.plan_attention(case.problem, case.batch)

        assert not plan.selection.spec.cpu, plan.selection.why

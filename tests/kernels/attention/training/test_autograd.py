"""Differentiable attention: values and gradients, every mask, and what PyTorch expects of an operator."""

from __future__ import annotations

import functools

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE, detect
from kernels.attention.training.registry import (
    TRAINING_REGISTRY,
    TrainingBatch,
    TrainingProblem,
    select_training,
)
from kernels.errors import NoKernelError, ShapeError
from tests.kernels.attention.training_cases import CASES, TILES, Case, dense, starts
from tests.kernels.references.problems import assert_no_worse_than, truth_dtype
from tests.kernels.triton_interpreter import interpreted

NAMED = [pytest.param(case, id=str(case)) for case in CASES]


def gradients(compute, inputs):
    """Return both results and the gradients of q, k and v."""
    *tensors, dout, dlse = inputs
    tensors = [x.detach().clone().requires_grad_() for x in tensors]
    out, lse = compute(*tensors)
    seen = torch.isfinite(lse)
    loss = (out * dout.to(out.dtype)).sum() + (lse[seen] * dlse.to(lse.dtype)[seen]).sum()
    loss.backward()
    grads = [torch.zeros_like(x) if x.grad is None else x.grad for x in tensors]
    return [out.detach(), lse.detach().masked_fill(~seen, 0.0), *grads]


def check(case, dtype, compute, atol):
    inputs = case.inputs(dtype)
    actual = gradients(compute, inputs)
    truth, same = (
        gradients(functools.partial(dense, case), [x.to(kind) for x in inputs])
        for kind in (truth_dtype(dtype), dtype)
    )
    for found, exact, rounded in zip(actual, truth, same, strict=True):
        assert_no_worse_than(found, exact, rounded, atol=atol)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("case", NAMED)
def test_values_and_gradients_agree_with_the_definition(case, dtype):
    def compute(*tensors):
        return kernels.flash_attention(*tensors, **case.arguments())

    check(case, dtype, compute, 0.02 if dtype is torch.bfloat16 else 1e-5)


@interpreted
@pytest.mark.parametrize("case", NAMED)
def test_the_triton_kernels_agree_with_the_definition(case, monkeypatch):
    from kernels.attention.training.portable import launch as training
    from kernels.attention.training.portable.launch import TrainingLaunch

    launch = TrainingLaunch(32, 16, 4, 1)
    monkeypatch.setattr(
        training, "_launches", lambda _q, problem: (launch.within(problem.mask_tile),) * 3
    )
    arguments = case.arguments()
    problem, batch = problem_of(case, arguments)
    q, k, v, dout, dlse = case.inputs(torch.float32)
    out, lse = training.PORTABLE.forward(q, k, v, batch, problem)
    dlse = dlse.masked_fill(lse == -torch.inf, 0.0)
    found = training.PORTABLE.backward((dout, dlse), (q, k, v, out, lse), batch, problem)

    exact = gradients(functools.partial(dense, case), [x.double() for x in (q, k, v, dout, dlse)])
    lse = lse.masked_fill(lse == -torch.inf, 0.0)
    for actual, truth in zip((out, lse, *found), exact, strict=True):
        torch.testing.assert_close(actual.double(), truth, rtol=2e-5, atol=2e-5)


def problem_of(case, arguments):
    mask = arguments.get("block_mask")
    keys = case.keys or case.queries
    options = {name: value for name, value in case.options.items() if name != "softmax_scale"}
    problem = TrainingProblem(
        softmax_scale=case.options.get("softmax_scale", case.head_dim**-0.5),
        max_seqlen_q=max(case.queries),
        max_seqlen_k=max(keys),
        mask_tile=(mask.block_q, mask.block_k) if mask else (0, 0),
        **options,
    )
    slopes = case.slopes().expand(len(case.queries), -1).contiguous() if case.alibi else None
    batch = TrainingBatch(
        starts(case.queries),
        starts(keys),
        slopes,
        mask.arrays if mask else None,
    )
    return problem, batch


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"causal": False},
        {"sliding_window": 3},
        {"softcap": 2.0},
        {"dropout_p": 0.3, "dropout_seed": 5},
        {"alibi_slopes": torch.tensor([0.5, 0.25, 0.1, 1.0])},
        {"alibi_slopes": torch.tensor([[0.5, 0.25, 0.1, 1.0], [0.1, 0.0, 0.7, 2.0]])},
        {"return_lse": True, "softcap": 1.0, "dropout_p": 0.2},
        {"block_mask": kernels.BlockMask.from_tiles(torch.eye(3, dtype=torch.bool), 4, 4)},
    ],
    ids=lambda options: "-".join(options) or "plain",
)
def test_gradcheck(options):
    torch.manual_seed(0)
    q = torch.randn(2, 7, 4, 6, dtype=torch.float64, requires_grad=True)
    k, v = (torch.randn(2, 9, 2, 6, dtype=torch.float64, requires_grad=True) for _ in range(2))

    assert torch.autograd.gradcheck(lambda *x: kernels.flash_attention(*x, **options), (q, k, v))


BY_SEQUENCE = Case(alibi=True, alibi_by_sequence=True)
TILED_CASE = next(it for it in CASES if it.tiles)


@pytest.mark.parametrize("case", [CASES[0], BY_SEQUENCE, TILED_CASE], ids=str)
def test_the_operators_keep_pytorchs_rules(case):
    problem, batch = problem_of(case, case.arguments())
    q, k, v, dout, dlse = case.inputs(torch.float32)
    arguments = (batch.encode(), *problem.encode())
    tensors = [x.requires_grad_() for x in (q, k, v)]

    torch.library.opcheck(torch.ops.tessera.flash_attention.default, (*tensors, *arguments))
    saved = [
        x.detach() for x in (q, k, v, *torch.ops.tessera.flash_attention(*tensors, *arguments))
    ]
    torch.library.opcheck(
        torch.ops.tessera.flash_attention_backward.default, ([dout, dlse], saved, *arguments)
    )


def test_autocast_changes_the_dtype_of_the_tensors_and_nothing_else():
    case = Case(queries=(40,), options={"causal": False})
    inputs = case.inputs(torch.float32)
    narrow = [it.bfloat16() for it in inputs[:4]] + [inputs[4]]

    def compute(*tensors):
        return kernels.flash_attention(*tensors, **case.arguments())

    plain = gradients(compute, narrow)
    with torch.autocast("cpu", torch.bfloat16):
        inside = gradients(compute, narrow)
        out, _ = compute(*inputs[:3])

    assert all(map(torch.equal, inside, plain))
    assert torch.equal(out, plain[0])


def test_it_compiles_without_a_graph_break():
    def loss(q, k, v):
        return kernels.flash_attention(q, k, v, causal=False, softcap=2.0).square().sum()

    found = []
    for function in (loss, torch.compile(loss, backend="aot_eager", fullgraph=True)):
        torch.manual_seed(0)
        tensors = [torch.randn(1, 9, 2, 8, requires_grad=True) for _ in range(3)]
        function(*tensors).backward()
        found.append([x.grad for x in tensors])
    for eager, compiled in zip(*found, strict=True):
        torch.testing.assert_close(compiled, eager)


def test_seven_runs_have_the_same_bits():
    case = Case(queries=(300, 17), options={"dropout_p": 0.2, "dropout_seed": 3})
    inputs = case.inputs(torch.bfloat16)
    runs = [
        gradients(lambda *x: kernels.flash_attention(*x, **case.arguments()), inputs)
        for _ in range(7)
    ]

    for run in runs[1:]:
        assert all(map(torch.equal, run, runs[0]))


def test_a_dropped_weight_depends_on_its_position_alone():
    torch.manual_seed(0)
    q, k, v = (torch.randn(600, 2, 8) for _ in range(3))
    options = {"dropout_p": 0.5, "dropout_seed": 9, "causal": True}
    whole = kernels.flash_attention(q, k, v, cu_seqlens_q=starts([600]), **options)
    mask = kernels.BlockMask.from_tiles(torch.ones(10, 10, dtype=torch.bool), 64, 64)
    tiled = kernels.flash_attention(q, k, v, cu_seqlens_q=starts([600]), block_mask=mask, **options)

    torch.testing.assert_close(tiled, whole)


def test_tiles_that_are_not_listed_are_never_read():
    q, k, v = (torch.randn(96, 2, 16) for _ in range(3))
    k[32:64], v[32:64] = torch.nan, torch.nan
    tiles = torch.tensor([[True, False, False]] * 2 + [[True, False, True]])
    mask = kernels.BlockMask.from_tiles(tiles, 32, 32)

    out = kernels.flash_attention(q, k, v, cu_seqlens_q=starts([96]), block_mask=mask)

    assert out.isfinite().all()


def test_scratch_grows_linearly_with_the_length():
    class Counter(torch.utils._python_dispatch.TorchDispatchMode):
        largest = 0

        def __torch_dispatch__(self, func, types, args=(), kwargs=None):
            out = func(*args, **(kwargs or {}))
            for it in out if isinstance(out, (list, tuple)) else (out,):
                if isinstance(it, torch.Tensor):
                    self.largest = max(self.largest, it.nbytes)
            return out

    from kernels.attention.training.pytorch import TILED

    def largest(length):
        case = Case(queries=(length,), heads=2, kv_heads=1, head_dim=16)
        problem, batch = problem_of(case, case.arguments())
        q, k, v, dout, dlse = case.inputs(torch.float32)
        with Counter() as counter:
            out, lse = TILED.forward(q, k, v, batch, problem)
            TILED.backward((dout, dlse), (q, k, v, out, lse), batch, problem)
        return counter.largest

    tile = 2 * 256 * 256 * 8  # int64 positions of a tile, for each head
    assert largest(4096) <= max(tile, 2 * 4096 * 16 * 4)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"sliding_window": 0}, "sliding_window is 0"),
        ({"sliding_window": 4, "causal": False}, "sliding_window is 4"),
        ({"softcap": 0.0}, "softcap is 0.0"),
        ({"dropout_p": 1.0}, "dropout_p is 1.0"),
        ({"dropout_seed": -1}, "dropout_seed is -1"),
        ({"alibi_slopes": torch.ones(3)}, "alibi_slopes is"),
        ({"alibi_slopes": torch.ones(2, 4)}, r"expected float32 \[4\] or \[1, 4\] on cpu"),
        ({"block_mask": kernels.BlockMask.from_tiles(TILES[0], 1, 1)}, "the block mask has tiles"),
    ],
)
def test_wrong_arguments_are_refused(options, words):
    q = torch.zeros(1, 8, 4, 16)

    with pytest.raises(ShapeError, match=words):
        kernels.flash_attention(q, q, q, **options)


@pytest.mark.parametrize(
    "cu_seqlens_q",
    [torch.zeros(3), torch.zeros((2, 2), dtype=torch.int32), torch.zeros(0, dtype=torch.int32)],
)
def test_wrong_starts_are_refused(cu_seqlens_q):
    q = torch.zeros(8, 4, 16)

    with pytest.raises(ShapeError, match="cu_seqlens_q"):
        kernels.flash_attention(q, q, q, cu_seqlens_q=cu_seqlens_q)


@pytest.mark.parametrize(
    ("arch", "dtype", "head_dim", "name"),
    [
        ("h100", torch.bfloat16, 128, "portable_backward"),
        ("a100", torch.float32, 256, "portable_backward"),
        ("h100", torch.float64, 64, "torch_backward"),
        ("h100", torch.bfloat16, 320, "torch_backward"),
        ("t4", torch.float16, 64, "torch_backward"),
    ],
)
def test_the_first_row_that_supports_a_problem_is_chosen(arch, dtype, head_dim, name):
    assert chosen(arch, torch.empty(1, 1, head_dim, dtype=dtype)) == name


@pytest.mark.parametrize(
    ("changes", "name"),
    [
        ({}, "hopper_forward"),
        ({"causal": False, "softcap": 20.0}, "hopper_forward"),
        ({"dropout_p": 0.1}, "portable_backward"),
        ({"softmax_scale": -1.0}, "portable_backward"),
        ({"mask_tile": (128, 128)}, "portable_backward"),
        ({"max_seqlen_k": 1000}, "portable_backward"),
    ],
    ids=str,
)
def test_hopper_has_a_forward_of_its_own_for_large_problems(changes, name):
    q = torch.empty(16384, 8, 128, dtype=torch.bfloat16)

    assert chosen("h100", q, **({"max_seqlen_k": 16384} | changes)) == name
    for arch, other, slopes in (
        ("a100", q, None),
        ("h100", q, torch.ones(8)),
        ("h100", q.float(), None),
        ("h100", q.view(-1, 64, 16), None),
    ):
        assert chosen(arch, other, slopes, max_seqlen_k=16384) == "portable_backward"


def chosen(arch, q, slopes=None, **options):
    offsets = torch.tensor([0, len(q)], dtype=torch.int32)
    mask = (offsets,) * 4 if "mask_tile" in options else None
    problem = TrainingProblem(**({"softmax_scale": 1.0} | options))
    return select_training(
        q, q, TrainingBatch(offsets, offsets, slopes, mask), problem, CATALOGUE[arch]
    ).name


def test_what_no_row_supports_is_refused_with_every_reason():
    q = torch.empty(1, 1, 64, dtype=torch.int8)
    offsets = torch.tensor([0, 1], dtype=torch.int32)

    with pytest.raises(NoKernelError) as error:
        select_training(
            q, q, TrainingBatch(offsets, offsets), TrainingProblem(softmax_scale=1.0), detect("cpu")
        )
    assert all(spec.name in str(error.value) for spec in TRAINING_REGISTRY)
    assert "no int8" in str(error.value)


@pytest.mark.parametrize("starts", [[0, 9], [1, 8], [0, 5, 3, 8], [0, 7]])
def test_starts_outside_the_rows_are_refused(starts):
    q = torch.zeros(8, 4, 16)

    with pytest.raises(ShapeError, match="expected 0, ascending numbers and 8"):
        kernels.flash_attention(q, q, q, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))

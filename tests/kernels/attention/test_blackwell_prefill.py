"""The host side of the Blackwell prefill: when it is chosen, and what it refuses."""

from __future__ import annotations

import dataclasses

import pytest
import torch

import kernels
from kernels.arch import CATALOGUE
from kernels.attention.problem import AttentionProblem, Phase
from kernels.attention.registry import REGISTRY
from kernels.errors import ShapeError
from tests.kernels.references.problems import make_case, make_packed_case
from tests.kernels.triton_interpreter import HAS_TRITON, interpreted

B200 = CATALOGUE["b200"]
ROW = next(row for row in REGISTRY if row.name == "blackwell_prefill")
NEVER_RUN = "never run, and unmeasured kernels are not allowed"


def problem(head_dim=128, *, unmeasured=True, **more):
    fields = {"dtype": "bfloat16", "num_heads": 8, "num_kv_heads": 2, "block_size": 16, **more}
    return AttentionProblem(
        Phase.PREFILL, head_dim=head_dim, softmax_scale=0.1, unmeasured=unmeasured, **fields
    )


def chosen(asked, arch=B200):
    return kernels.select(asked, arch)


@pytest.mark.parametrize("sm", [100, 103])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_is_chosen_where_unmeasured_kernels_are_allowed(sm, head_dim):
    selection = chosen(problem(head_dim), dataclasses.replace(B200, sm=sm))

    assert selection.spec is ROW
    assert "never run" in selection.why
    assert "unmeasured allowed" in selection.why


def test_it_is_passed_over_by_default_and_the_plan_says_why():
    selection = chosen(problem(unmeasured=False))

    assert selection.spec.name == "portable_prefill"
    assert selection.refusals[0] == (ROW.name, (NEVER_RUN,))


@pytest.mark.parametrize(
    ("more", "reason"),
    [
        ({"head_dim": 80}, "head_dim 80 is not one of [64, 128]"),
        ({"head_dim": 256}, "head_dim 256 is not one of [64, 128]"),
        ({"dtype": "float32"}, "no float32"),
        ({"block_size": 8}, "block_size 8 is not from 16 to 256"),
        ({"block_size": 48}, "block_size 48 is not a power of two"),
        ({"kv_dtype": "float8_e4m3fn"}, "no float8_e4m3fn cache"),
        ({"batch_invariant": True}, "not batch invariant"),
    ],
    ids=str,
)
def test_what_it_does_not_support_is_refused_by_name(more, reason):
    assert ROW.unsupported(problem(**more), B200) == (reason,)


def test_it_supports_windows_softcaps_and_packed_keys_for_any_group():
    for more in (
        {"sliding_window": 100, "softcap": 30.0, "lse": True, "num_heads": 14},
        {"block_size": None, "causal": False},
        {"dtype": "float16", "num_heads": 128},
    ):
        assert ROW.unsupported(problem(**more), B200) == ()


@pytest.mark.parametrize("arch", ["h100", "rtx5090", "cpu"])
def test_other_processors_lack_tensor_memory(arch):
    assert chosen(problem(), CATALOGUE[arch]).spec is not ROW


def test_the_other_rows_ignore_what_is_allowed():
    for arch in ("h100", "a100", "cpu"):
        for phase in Phase:
            asked = dataclasses.replace(problem(64), phase=phase)
            plain = dataclasses.replace(asked, unmeasured=False)

            assert chosen(asked, CATALOGUE[arch]).spec is chosen(plain, CATALOGUE[arch]).spec


@interpreted
def test_a_misaligned_tensor_is_rejected_before_a_launch():
    case = make_case(problem(), [20, 3], [40, 300])
    plan = kernels.plan_attention(problem(), case.batch, selection=chosen(problem()))
    odd = torch.empty(case.q.numel() + 1, dtype=case.q.dtype)[1:].view(case.q.shape)
    out = torch.full_like(case.q, 7.0)

    with pytest.raises(ShapeError, match=r"q is at address .* multiples of 16 bytes"):
        kernels.prefill_attention(odd, case.kv, plan, out)

    assert bool((out == 7.0).all())


@interpreted
def test_a_step_with_no_query_or_no_key_launches_nothing():
    asked = problem(block_size=None, lse=True)
    for queries, keys in (([20, 3], [0, 0]), ([0], [5])):
        case = make_packed_case(asked, queries, keys)

        out, lse = case.attend(chosen(asked))

        assert out.shape[0] == sum(queries)
        assert not bool(out.any())
        assert bool((lse == float("-inf")).all())


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
def test_its_tiles_are_those_of_the_model():
    from tests.kernels.attention import blackwell_model

    assert ROW.launch.block_m == 2 * blackwell_model.ROWS
    assert {tuned.launch.block_n for tuned in chosen(problem()).launches} == {
        blackwell_model.BLOCK_N
    }

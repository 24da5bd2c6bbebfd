"""Compiles decode rows of recurrent mixers for absent GPUs: those with drafts add up in the order of single rows."""

from __future__ import annotations

import pytest

from tests.kernels.compile.fused_compile_worker import ROW_KERNELS, FusedJob
from tests.kernels.compile.recurrent_launches import GATED_DELTA, MAMBA2
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

SHAPES = {"gated_delta": GATED_DELTA, "mamba2": MAMBA2, "short_conv": {(): None}}
CASES = [
    (sm, operation, around)
    for sm in (80, 89, 90, 100)
    for operation, shapes in SHAPES.items()
    for around in shapes
    if "divided norm" not in around
] + [(90, it, (dtype,)) for it in ("gated_delta", "mamba2") for dtype in ("float16", "float32")]


@pytest.mark.parametrize("case", slow_except([(90, "gated_delta", ()), (90, "mamba2", ())], CASES))
def test_rows_with_drafts_have_the_sums_of_rows_of_one_token(case, compile_job):
    """The layouts of what is added up decide the order of additions."""
    sm, operation, around = case

    def sums(names, *more):
        found = set()
        for name in names:
            job = FusedJob(sm, operation, around=(*around, *more), tokens=64, function=name)
            facts = compile_job(job)
            assert "error" not in facts, facts
            found |= {*facts["sums"]}
        return found

    single, drafts = ROW_KERNELS[operation]

    assert sums(drafts, "drafts") == sums(single) != set()


@pytest.mark.parametrize("operation", slow_except([], ("mamba2", "short_conv")))
def test_the_convolution_of_rows_with_drafts_has_the_sums_of_that_of_rows_of_one_token(
    operation, compile_job
):
    found = [
        compile_job(FusedJob(90, operation, around=around, tokens=64, function=name))["sums"]
        for around, name in (((), "convolve_rows"), (("drafts",), "convolve_drafts"))
    ]

    assert found[0] == found[1] != []

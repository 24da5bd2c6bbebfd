"""Compiles the gate of attention's result for absent GPUs, and counts its loads."""

from __future__ import annotations

import pytest

from tests.kernels.compile.fused_compile_worker import FusedJob
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

JOBS = [FusedJob(sm, "output_gate", tokens=64) for sm in (80, 89, 90, 100, 120)]


@pytest.mark.parametrize("job", slow_except([FusedJob(90, "output_gate", tokens=64)], JOBS))
def test_an_output_gate_has_one_wide_load_of_each_tensor_after_the_wait(job, compile_job):
    facts = compile_job(job)

    assert "error" not in facts, facts
    assert facts["sass"] == {"LDG.128": 2, "STG.128": 1}
    assert facts["spill_stores"] == 0
    assert facts["ptx"].get("griddepcontrol.wait", 0) == (job.sm >= 90)

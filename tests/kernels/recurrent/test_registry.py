"""Which kernel computes short convolutions and Mamba-2, and why others do not."""

from __future__ import annotations

import dataclasses
import inspect

import pytest

from kernels.arch import CATALOGUE
from kernels.recurrent.problem import RecurrentProblem
from kernels.recurrent.registry import REGISTRY, TRITON, select
from kernels.recurrent.segments import RecurrentKernel
from kernels.selection import load
from tests.kernels.recurrent.cases import MAMBA2, SHORT_CONV
from tests.kernels.triton_interpreter import HAS_TRITON


@pytest.mark.parametrize("shape", [MAMBA2, SHORT_CONV], ids=str)
@pytest.mark.parametrize("gpu", ["a100", "h100", "b200"])
def test_gpus_with_tensor_cores_take_triton_for_deterministic_steps_too(gpu, shape):
    choice = select(RecurrentProblem(shape, "bfloat16"), CATALOGUE[gpu])

    assert choice.spec is TRITON
    assert choice.spec.batch_invariant
    assert "equal bits" in choice.why


@pytest.mark.parametrize(
    ("change", "asked", "reason"),
    [
        ({}, {"trainable": True}, "not differentiable"),
        ({}, {"dtype": "float64"}, "no float64"),
        ({"width": 9}, {}, "convolutions of 2 to 8 tokens, not 9"),
        ({"width": 1}, {}, "convolutions of 2 to 8 tokens, not 1"),
        ({"state_dim": 512}, {}, "states of up to 256 columns a head in bfloat16, not 512"),
        ({"state_dim": 256}, {"dtype": "float32"}, "states of up to 128 columns a head in float32, not 256"),
    ],
    ids=str,
)  # fmt: skip
def test_what_triton_cannot_compute_is_told_and_left_to_pytorch(change, asked, reason):
    problem = RecurrentProblem(
        dataclasses.replace(MAMBA2, **change), **{"dtype": "bfloat16"} | asked
    )

    choice = select(problem, CATALOGUE["h100"])

    assert choice.spec.name == "torch_recurrent"
    assert not choice.spec.batch_invariant
    assert reason in next(it.reasons for it in choice.refusals if it.kernel == TRITON.name)


@pytest.mark.parametrize(
    "target",
    [
        pytest.param(
            target,
            marks=pytest.mark.skipif(
                ".gpu." in target and not HAS_TRITON, reason="Triton is not built for this host"
            ),
        )
        for row in REGISTRY
        for target in row.targets.values()
    ],
)
def test_every_kernel_takes_the_arguments_of_the_protocol_by_position(target):
    kernel, protocol = load(target), inspect.signature(RecurrentKernel.__call__)

    assert all(it.kind is it.POSITIONAL_ONLY for it in protocol.parameters.values())
    inspect.signature(kernel.__call__).bind(*protocol.parameters)
    inspect.signature(kernel.dense).bind("self", "projected", "gates")

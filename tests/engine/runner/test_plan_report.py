"""The attention plan as the engine reports it."""

import dataclasses
import logging

import msgspec
import pytest
import torch

from kernels.arch import CATALOGUE, detect
from kernels.cpu.library import load
from kernels.weight_format import FP8_ROWS
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from model.families.parts import with_windows
from model.hub.resolve import resolve
from server.engine.core.plan_report import PlanReport
from server.engine.runner.explain.model_plan import explain_model
from server.engine.runner.step.model_runner import ModelRunner
from tests.model.configs import read_again
from tests.model.executors.paged import new_cache
from tests.plans import PLAN


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_folder(resolve("bundled"))


def planned(config, arch, dtype=torch.bfloat16):
    return explain_model(DecoderLM(config, dtype, "meta"), 16, CATALOGUE[arch])


@pytest.mark.parametrize("arch", CATALOGUE)
def test_every_known_processor_has_a_plan_with_reasons_that_can_be_decoded(config, arch):
    plan = planned(config, arch)

    assert [phase.phase for phase in plan.phases] == ["prefill", "decode"]
    for phase in plan.phases:
        assert phase.kernel in phase.why
        assert all(row.reasons for row in phase.refused)
        assert all(launch.provenance for launch in phase.launches)
        assert bool(phase.launches) == (phase.flash_attention is not None)
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(plan), type=PlanReport) == plan


@pytest.mark.parametrize(
    ("arch", "kernels", "generations", "tested"),
    [
        ("cpu", ["torch_prefill", "torch_decode"], [None, None], True),
        ("t4", ["torch_prefill", "torch_decode"], [None, None], False),
        ("a100", ["portable_prefill", "portable_decode"], [2, 2], False),
        ("h100", ["hopper_prefill", "hopper_keys_on_m_decode"], [3, 3], True),
        ("h200", ["hopper_prefill", "hopper_keys_on_m_decode"], [3, 3], True),
        ("b200", ["portable_prefill", "portable_decode"], [2, 2], False),
    ],
)
def test_a_phase_reports_its_flash_attention_generation_and_whether_it_is_tested(
    config, arch, kernels, generations, tested
):
    phases = planned(config, arch).phases

    assert [phase.kernel for phase in phases] == kernels
    assert [phase.flash_attention for phase in phases] == generations
    assert {phase.tested for phase in phases} == {tested}


def test_a_kernel_that_never_ran_is_planned_only_if_it_is_allowed_and_is_not_tested(config):
    wide = read_again(config, head_dim=128)
    model = DecoderLM(wide, torch.bfloat16, "meta")
    default = explain_model(model, 16, CATALOGUE["b200"])
    model.unmeasured_kernels = True
    allowed = explain_model(model, 16, CATALOGUE["b200"])

    refused = {row.kernel: row.reasons for row in default.phases[0].refused}
    assert refused["blackwell_prefill"] == ["never run, and unmeasured kernels are not allowed"]
    assert [phase.kernel for phase in allowed.phases] == ["blackwell_prefill", "portable_decode"]
    assert "never run" in allowed.phases[0].why
    assert "never run" in str(allowed)
    assert not any(phase.tested for phase in allowed.phases)


def test_a_kernel_that_is_not_measured_for_a_head_dim_has_run_and_needs_to_be_allowed(config):
    model = DecoderLM(read_again(config, head_dim=128), torch.bfloat16, "meta")
    default = explain_model(model, 16, CATALOGUE["h100"]).phases[1]
    model.unmeasured_kernels = True
    allowed = explain_model(model, 16, CATALOGUE["h100"]).phases[1]

    assert default.kernel == "hopper_decode"
    assert {row.kernel: row.reasons for row in default.refused} == {
        "hopper_keys_on_m_decode": [
            "not measured for head_dim 128 and 3 query heads per key-value head, and unmeasured kernels are not allowed"
        ]
    }
    assert (allowed.kernel, allowed.tested) == ("hopper_keys_on_m_decode", True)


def test_the_plan_says_how_steps_of_a_few_sequences_are_computed_and_why(config):
    changes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    model = DecoderLM(read_again(config, **changes), torch.bfloat16, "meta")
    model.unmeasured_kernels = True

    found = [explain_model(model, 16, CATALOGUE[arch]).one_sequence for arch in ("h100", "b200")]

    assert found[0] == "in one launch; 2, 4, 8 sequences in one launch"
    assert found[1].startswith(
        "in one launch, which no GPU of this architecture has run; 2, 4, 8 sequences layer by layer: needs sm_90"
    )


def test_the_plan_says_that_steps_with_weights_in_fp8_are_one_launch_up_to_a_size(config):
    changes = {"hidden_size": 64, "intermediate_size": 128, "head_dim": 32}
    small = read_again(config, **changes)
    large = read_again(small, hidden_size=4160)
    found = [
        explain_model(DecoderLM(it, torch.bfloat16, "meta", FP8_ROWS), 16, CATALOGUE["h100"])
        for it in (small, large)
    ]

    assert found[0].one_sequence == "in one launch; 2, 4, 8 sequences in one launch"
    assert found[1].one_sequence == ("layer by layer: a hidden size of 4160, at most 4096")


def test_launches_are_in_order_of_preference(config):
    wide = read_again(config, head_dim=128)
    launches = planned(wide, "h100").phases[1].launches

    steps = [(launch.min_num_seqs, launch.max_seqlen_k) for launch in launches]
    assert steps == [(132, None), (66, None), (0, 2048), (0, None)]
    assert all(launch.measured for launch in launches)


def test_a_runner_reports_the_plan_for_its_device_and_cache(config):
    model = DecoderLM(config, torch.float32)
    cache = new_cache(model, 2, 32)

    report = ModelRunner(model, cache).describe_plan()

    assert (report.arch, report.dtype, report.block_size) == ("cpu", "float32", 32)
    assert report.arch_name == detect("cpu").name
    row = "torch" if isinstance(load(), str) else "cpu"
    assert [phase.kernel for phase in report.phases] == [f"{row}_prefill", f"{row}_decode"]


def test_the_weights_of_a_model_that_is_packed_for_a_cpu_are_those_of_the_plan_without_it(config):
    model = DecoderLM(config, torch.float32)
    model.init_weights()
    model.optimize()

    memory = explain_model(model, 16, CATALOGUE["cpu"]).memory

    assert memory == planned(config, "cpu", torch.float32).memory


def test_a_model_with_two_kinds_of_layer_has_a_plan_for_each(config):
    layers = with_windows(config.network.layers[0], (None, 100) * 3)
    mixed = dataclasses.replace(config, network=dataclasses.replace(config.network, layers=layers))

    plan = planned(mixed, "h100")

    assert [(phase.phase, phase.sliding_window) for phase in plan.phases] == [
        ("prefill", None), ("decode", None), ("prefill", 100), ("decode", 100),
    ]  # fmt: skip


def test_planning_logs_nothing(config, caplog):
    caplog.set_level(logging.DEBUG)

    planned(config, "t4", torch.float16)

    assert not caplog.records


def test_the_log_line_names_the_kernels():
    assert str(PLAN) == (
        "attention on NVIDIA H100: prefill by torch_prefill, decode by portable_decode, "
        "decode by portable_decode (window 4096)"
    )


def test_the_log_line_says_that_the_kernels_never_ran_on_such_a_gpu(config):
    assert str(planned(config, "a100")).endswith(
        "; never run here: no GPU of this architecture (sm_80) has ever run it"
    )


@pytest.mark.parametrize("arch", CATALOGUE)
def test_the_plan_says_which_requests_are_deterministic(config, arch):
    plan = planned(config, arch).deterministic

    if CATALOGUE[arch].sm < 80:
        assert plan.requests == "none"
        assert "sm_75" in plan.why or "CPU" in plan.why
    else:
        assert plan.requests == "on request"
        ours = "hopper_" if CATALOGUE[arch].sm == 90 else ""
        assert f"by {ours}invariant_prefill, {ours}invariant_decode" in plan.why


def test_with_all_requests_deterministic_the_plan_has_the_kernels_of_deterministic_steps(config):
    model = DecoderLM(config, torch.bfloat16, "meta")

    plan = explain_model(model, 16, CATALOGUE["h100"], deterministic=True)

    assert plan.deterministic.requests == "all"
    assert [it.kernel for it in plan.phases] == [
        "hopper_invariant_prefill",
        "hopper_invariant_decode",
    ]
    assert plan.one_sequence == "layer by layer: deterministic"

"""The plan on its way from the kernels to the front end."""

import dataclasses
import typing

import msgspec
import pytest
import torch

from kernels.arch import CATALOGUE, detect
from kernels.explain import plan as explain
from model.checkpoint.config import ModelConfig
from model.checkpoint.hub import resolve
from model.device.kv_cache import KVCache
from model.network.decoder import DecoderLM
from server.engine.link import plan_report
from server.engine.link.plan_report import PlanReport
from server.engine.runner.model_plan import explain_model
from server.engine.runner.model_runner import ModelRunner
from tests.plans import PLAN

RECORDS = {
    explain.RefusedRow: plan_report.RefusedRow,
    explain.LaunchPlan: plan_report.LaunchPlan,
    explain.StepPlan: plan_report.StepPlan,
    explain.PhasePlan: plan_report.PhasePlan,
    explain.Explanation: plan_report.PlanReport,
}


@pytest.fixture(scope="module")
def config():
    return ModelConfig.from_folder(resolve("bundled"))


@pytest.mark.parametrize("ours", RECORDS, ids=lambda record: record.__name__)
def test_the_wire_has_every_field_of_the_explanation_in_its_order(ours):
    names = [field.name for field in dataclasses.fields(ours)]

    assert list(RECORDS[ours].__struct_fields__) == names
    assert list(typing.get_type_hints(RECORDS[ours])) == names


@pytest.mark.parametrize("arch", CATALOGUE.values(), ids=lambda arch: arch.key)
def test_a_plan_survives_the_way_to_the_front_end(config, arch):
    plan = explain_model(DecoderLM(config, torch.bfloat16, "meta"), 16, arch)

    report = msgspec.convert(plan, PlanReport, from_attributes=True)
    received = msgspec.msgpack.decode(msgspec.msgpack.encode(report), type=PlanReport)

    assert received == report
    assert msgspec.json.encode(plan) == msgspec.json.encode(received)


def test_a_runner_describes_the_plan_of_its_own_device_and_cache(config):
    model = DecoderLM(config, torch.float32)
    cache = KVCache(1, 2, 32, config.num_kv_heads, config.head_dim, torch.float32, "cpu")

    report = ModelRunner(model, cache).describe_plan()

    assert (report.arch, report.dtype, report.block_size) == ("cpu", "float32", 32)
    assert report.arch_name == detect("cpu").name
    assert [phase.kernel for phase in report.phases] == ["torch_prefill", "torch_decode"]
    assert max(step.context for phase in report.phases for step in phase.steps) == 2048


def test_a_model_with_two_kinds_of_layer_has_a_plan_for_each(config):
    mixed = dataclasses.replace(
        config,
        sliding_window=100,
        layer_types=("full_attention", "sliding_attention") * (config.num_layers // 2),
    )

    plan = explain_model(DecoderLM(mixed, torch.bfloat16, "meta"), 16, CATALOGUE["h100"])

    assert [(phase.phase, phase.sliding_window) for phase in plan.phases] == [
        ("prefill", None), ("decode", None), ("prefill", 100), ("decode", 100),
    ]  # fmt: skip


def test_one_line_of_the_log_names_the_kernels():
    assert str(PLAN) == (
        "attention on NVIDIA H100: prefill by torch_prefill, decode by portable_decode, "
        "decode by portable_decode (window 4096)"
    )

"""The plan as data and as text: what would run, why, and what it costs at least."""

from __future__ import annotations

import dataclasses
import json
import logging

import pytest
import torch

from kernels.arch import CATALOGUE
from kernels.attention.problem import (
    AttentionProblem,
    LaunchConfig,
    PagedBatch,
    Phase,
    TunedLaunch,
    select,
)
from kernels.attention.registry import REGISTRY
from kernels.attention.splits import plan_splits
from kernels.errors import NoKernelError
from kernels.explain import plan as explain_module
from kernels.explain.plan import DECODE_STEPS, PREFILL_STEPS, explain
from kernels.explain.text import WIDTH, render
from kernels.tuning import tuned_launches

ARCHES = [pytest.param(arch, id=arch.key) for arch in CATALOGUE.values()]


def problems(dtype="bfloat16", **more):
    fields = {"num_heads": 32, "num_kv_heads": 8, "head_dim": 128, "block_size": 16} | more
    return [AttentionProblem(phase, dtype, softmax_scale=0.1, **fields) for phase in Phase]


def explained(key, max_context=1 << 20, **more):
    return explain(problems(**more), CATALOGUE[key], max_context)


@pytest.mark.parametrize("arch", ARCHES)
def test_every_known_processor_is_explained_for_every_step(arch):
    plan = explain(problems(), arch, 1 << 20)

    assert [phase.phase for phase in plan.phases] == ["prefill", "decode"]
    for phase, steps in zip(plan.phases, (PREFILL_STEPS, DECODE_STEPS), strict=True):
        assert [(s.num_seqs, s.query_tokens, s.context) for s in phase.steps] == list(steps)
        assert phase.kernel in phase.why
        assert all(row.reasons for row in phase.refused)
        assert all(s.flops > 0 and s.bytes_moved > 0 for s in phase.steps)


@pytest.mark.parametrize("arch", ARCHES)
def test_an_explanation_is_plain_data(arch):
    json.dumps(dataclasses.asdict(explain(problems(), arch, 1 << 20)), allow_nan=False)


def test_our_kernels_have_a_launch_that_says_where_it_is_from():
    for phase in explained("h100").phases:
        for step in phase.steps:
            assert step.launch.provenance
            assert step.launch.num_programs >= 1
            assert (step.launch.num_kv_splits is None) == (phase.phase == "prefill")


def test_a_pytorch_row_has_no_launch_and_says_what_was_refused():
    for phase in explained("t4", dtype="float16").phases:
        assert all(step.launch is None for step in phase.steps)
        assert "tensor cores from sm_80 on" in phase.refused[-1].reasons[0]


def test_steps_longer_than_the_model_are_cut_and_not_repeated():
    prefill, decode = explained("h100", max_context=2048).phases

    assert [(s.query_tokens, s.context) for s in prefill.steps] == [
        (128, 128), (512, 512), (2048, 2048), (512, 2048),
    ]  # fmt: skip
    assert [(s.num_seqs, s.context) for s in decode.steps] == [
        (1, 1024), (1, 2048), (8, 1024), (32, 2048), (128, 1024),
    ]  # fmt: skip


def test_a_context_of_one_token_is_explained():
    prefill, decode = explained("h100", max_context=1).phases

    assert [(s.query_tokens, s.context) for s in prefill.steps] == [(1, 1)]
    assert {s.launch.num_kv_splits for s in decode.steps} == {1}


def test_one_long_sequence_is_split_more_than_many_short_ones():
    steps = explained("h100").phases[1].steps
    splits = {(s.num_seqs, s.context): s.launch.num_kv_splits for s in steps}

    assert splits[1, 16384] > splits[8, 1024] >= splits[128, 1024] == 1


def test_a_window_leaves_fewer_keys_to_split_and_read():
    full, windowed = (explained("h100", sliding_window=w).phases[1].steps[1] for w in (None, 512))

    assert windowed.launch.num_kv_splits < full.launch.num_kv_splits
    assert windowed.bytes_moved < full.bytes_moved / 20


def test_a_prefill_launches_a_program_for_each_tile_of_packed_heads():
    step = explained("a100").phases[0].steps[1]

    assert step.launch.num_programs == 8 * -(-512 * 4 // step.launch.block_m)


def test_a_kernel_whose_programs_stay_launches_no_more_of_them_than_there_are_sms():
    first, _, long, *_ = explained("h100").phases[0].steps

    assert first.launch.num_programs == 8 * -(-128 * 4 // first.launch.block_m)
    assert long.launch.num_programs == CATALOGUE["h100"].num_sms


def test_the_tile_follows_the_length_where_the_table_has_several(monkeypatch):
    def by_length(spec, problem, arch):
        return (
            TunedLaunch(LaunchConfig(16, 32, 4, 2), 1024, "short", measured=True),
            TunedLaunch(LaunchConfig(16, 128, 8, 3), None, "long", measured=False),
        )

    monkeypatch.setattr(explain_module, "tuned_launches", by_length)
    steps = explained("h100").phases[1].steps
    text = render(explained("h100"), "a model")

    assert {(s.context, s.launch.block_n, s.launch.measured) for s in steps} == {
        (1024, 32, True), (4096, 128, False), (16384, 128, False),
    }  # fmt: skip
    assert "launch  short" in text
    assert "launch  not measured; long" in text


def test_a_gpu_whose_peaks_are_not_known_is_planned_without_a_least_time():
    unknown = dataclasses.replace(
        CATALOGUE["a100"], key="a30", name="NVIDIA A30", memory_bandwidth_gbs=0, half_tflops=0.0
    )
    plan = explain(problems(), unknown, 4096)

    steps = [step for phase in plan.phases for step in phase.steps]
    assert {(step.roofline_us, step.bound) for step in steps} == {(None, None)}
    assert "peaks in bfloat16 not known" in render(plan, "a model")


def test_where_no_row_takes_the_problem_every_reason_is_listed():
    asked = [dataclasses.replace(problems()[1], max_query_tokens=4)]

    with pytest.raises(NoKernelError, match="portable_decode: needs a GPU\n  torch_prefill"):
        explain(asked, CATALOGUE["cpu"], 4096)


@pytest.mark.parametrize("arch", ARCHES)
def test_the_text_names_the_processor_the_model_and_every_reason_within_its_width(arch):
    plan = explain(problems(sliding_window=4096), arch, 1 << 20)
    text = render(plan, "some-model")

    lines = text.splitlines()
    assert lines[0].startswith(arch.name)
    assert lines[1].startswith("some-model in bfloat16: 32 query heads, 8 key-value heads")
    assert max(map(len, lines)) <= WIDTH
    assert text.count("why     ") == 2
    assert text.count("not     ") == sum(len(phase.refused) for phase in plan.phases)
    assert sum(line.startswith(("prefill w4096", "decode w4096")) for line in lines) == 10


@pytest.mark.parametrize("num_seqs", [1, 8, 128])
@pytest.mark.parametrize("batch_invariant", [False, True])
def test_the_splits_are_those_that_the_kernel_asks_its_device_for(
    monkeypatch, num_seqs, batch_invariant
):
    decode = pytest.importorskip("kernels.attention.hopper.decode")
    split_list = pytest.importorskip("kernels.attention.gpu.split_list")
    asked = problems(batch_invariant=batch_invariant)[1]
    arch = CATALOGUE["h100"]
    launched = {}

    class Recorder:
        def __getitem__(self, grid):
            def launch(*arguments, **constants):
                launched.update(constants, wanted=arguments[5], fixed=arguments[6])

            return launch

    monkeypatch.setattr(split_list, "list_splits", Recorder())
    lengths = torch.full((num_seqs,), 1024, dtype=torch.int32)
    batch = PagedBatch(
        torch.arange(num_seqs + 1, dtype=torch.int32), lengths, lengths[:, None], num_seqs, 1, 1024
    )
    selection = select(asked, arch, REGISTRY, tuned_launches)
    decode.HopperDecode(asked, batch, selection)

    splits = plan_splits(
        [(0, 1024)] * num_seqs, launched["BLOCK_N"], launched["wanted"], launched["fixed"]
    )
    steps = explain([asked], arch, 1024).phases[0].steps

    step = next(s for s in steps if s.num_seqs == num_seqs)
    assert step.launch.num_kv_splits * num_seqs == len(splits)
    assert step.launch.num_programs == len(splits) * launched["NUM_ARRIVALS"]


def test_explaining_logs_nothing(caplog):
    caplog.set_level(logging.DEBUG)

    explained("t4", dtype="float16")

    assert not caplog.records

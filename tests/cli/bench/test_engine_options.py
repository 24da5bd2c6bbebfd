"""Names of workloads, and the settings that they need."""

import pytest

from model.checkpoint.config import ModelConfig
from server.cli.bench.engine.options import SHAPES, adapt, make_plan, shapes
from server.cli.bench.engine.workloads import Workload, parse
from server.cli.commands import command_parser
from server.cli.parsing.setting_flags import given_settings
from server.engine.core.messages import EngineConfig


def read_options(flags):
    arguments = ["bench", "engine", *flags]
    return command_parser(arguments).parse_args(arguments)


def plan(*flags):
    return make_plan(read_options(flags))


@pytest.mark.parametrize(
    ("name", "workloads"),
    [
        ("batch1", [Workload("batch", 1)]),
        ("batch", [Workload("batch", 1)]),
        ("decode256", [Workload("decode", 256)]),
        ("decode", [Workload("decode", n) for n in (8, 32, 128, 256)]),
        ("ttft", [Workload("ttft", 128), Workload("ttft", 4096)]),
        ("mixed8", [Workload("mixed", 8)]),
        ("hit", [Workload("hit", 32768), Workload("hit", 131072)]),
        ("context500", [Workload("context", 500)]),
    ],
)
def test_a_name_is_a_kind_and_a_size_or_a_kind_with_its_usual_sizes(name, workloads):
    assert parse(name) == workloads


@pytest.mark.parametrize("name", ["", "speed", "decode0", "decode-1", "8decode", "ttft1.5"])
def test_other_names_are_refused(name):
    with pytest.raises(ValueError, match="is none of"):
        parse(name)


def test_without_flags_the_standard_workloads_are_measured():
    whole = plan()

    assert {kind for kind, _ in whole.workloads} == {"batch", "decode", "ttft", "mixed"}
    assert (whole.prompt, whole.steps, str(whole.lengths)) == (128, 256, "100-1024")


def test_long_contexts_are_measured_alone_or_beside_other_workloads():
    alone, beside = plan("--long-context"), plan("--long-context", "--workloads", "batch1")

    assert [Workload("batch", 1), *alone.workloads] == [*beside.workloads]
    assert {size for _, size in alone.workloads} == {32768, 131072}
    assert {kind for kind, _ in alone.workloads} == {"ttft", "hit", "context"}
    assert alone.most_sequences == 1
    adapted = adapt(config(), alone, set(), 10**6)
    assert adapted.max_model_len == 131072 + 256 + 1
    assert adapted.enable_prefix_caching
    assert adapt(config(), alone, set(), 131072).max_model_len == 131072


def test_a_workload_named_twice_is_measured_once():
    assert plan("--workloads", "decode8", "batch", "decode8").workloads == (
        ("decode", 8),
        ("batch", 1),
    )


def test_early_sequences_continue_until_the_last_ones_decode():
    whole = plan("--workloads", "decode256")

    assert whole.outputs(1, 2048) == 256
    assert whole.outputs(256, 2048) == 256 + 2 * 16


def config(**settings):
    return EngineConfig(model_path="x", model_id="x", **settings)


def test_the_engine_is_as_large_as_the_workloads_need():
    adapted = adapt(config(), plan("--workloads", "decode32", "ttft4096"), set(), 10_000)

    assert (adapted.max_num_seqs, adapted.max_model_len) == (32, 4097)
    assert not adapted.enable_prefix_caching


def test_the_engine_is_large_enough_to_run_the_kernels_of_a_service():
    adapted = adapt(config(), plan("--workloads", "batch1"), set(), 10_000)

    assert (adapted.max_num_seqs, adapted.max_model_len) == (1, 2048)


def test_the_longest_sequence_allows_for_prompts_computed_in_chunks():
    large = plan("--workloads", "decode256", "--prompt-tokens=4000")
    adapted = adapt(config(max_num_batched_tokens=2048), large, set(), 100_000)

    assert adapted.max_model_len == 4000 + 256 + 2 * (256 * 4000 // 2048)


def test_the_context_does_not_exceed_that_of_the_model():
    assert adapt(config(), plan("--workloads", "ttft4096"), set(), 3000).max_model_len == 3000


def test_settings_of_the_operator_are_kept():
    chosen = config(max_num_seqs=64, max_model_len=99)
    given = {"max_num_seqs", "enable_prefix_caching", "max_model_len"}

    assert adapt(chosen, plan(), given, 3000) == chosen


def test_other_flags_are_settings():
    read = read_options(["--model=m", "--profile", "--device", "cpu", "--cuda-graphs"])

    assert read.profile
    assert given_settings(read) == {"model": "m", "device": "cpu", "cuda_graphs": "true"}


@pytest.mark.parametrize(
    "flag", ["--steps=0", "--steps=-1", "--prompt-tokens=x", "--workloads=speed", "--lengths=9-1"]
)
def test_invalid_flags_are_refused(flag, capsys):
    with pytest.raises(SystemExit) as end:
        read_options([flag])
    assert end.value.code == 2
    assert flag.split("=")[0] in capsys.readouterr().err


def test_shapes_are_available_as_models():
    assert len(shapes()) == 22
    assert "llama-3.2-1b" in shapes()
    assert len(ModelConfig.from_folder(SHAPES / "qwen3-0.6b").network.layers) == 28

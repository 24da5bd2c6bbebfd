"""Which models support decode steps in a single launch, and the reasons for the others."""

import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, NEVER_RUN
from kernels.step.single_launch import ROW_COUNTS, StepShape, computed_as_rows, unsupported
from kernels.step.sizes import COLUMNS, PARTS, step_sizes
from kernels.weight_format import FP8_ROWS, INT8_ROWS, WeightFormat
from model.decoder import DecoderLM
from model.executors import single_launch
from model.executors.single_launch import step_shape
from model.network.spec import Rotary
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.model.configs import changed, model_config

HOPPER = ARCHES[90]
CONFIG = model_config(
    architecture="LlamaForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=2,
    num_heads=4,
    num_kv_heads=2,
    head_dim=8,
    max_position_embeddings=64,
    rope=Rotary(),
)
LOCAL_ROPE = {
    "local_rope": Rotary(theta=100.0),
    "sliding_window": 16,
    "layer_types": ("sliding_attention", "full_attention"),
}
QWEN = StepShape(1024, 3072, 16, 8, 128, 151936, 1e-6, 128**-0.5)


KNOWN = {
    "SmolLM2-135M": (576, 1536, 9, 3, 64, 49152),
    "SmolLM2-360M": (960, 2560, 15, 5, 64, 49152),
    "Qwen2.5-0.5B": (896, 4864, 14, 2, 64, 151936),
    "Qwen2.5-1.5B": (1536, 8960, 12, 2, 128, 151936),
    "Qwen3-0.6B": (1024, 3072, 16, 8, 128, 151936),
    "Qwen3-1.7B": (2048, 6144, 16, 8, 128, 151936),
    "TinyLlama-1.1B": (2048, 5632, 32, 4, 64, 32000),
    "Llama-3.2-1B": (2048, 8192, 32, 8, 64, 128256),
    "Llama-3.2-3B": (3072, 8192, 24, 8, 128, 128256),
    "GPT-2's vocabulary": (768, 3072, 12, 12, 64, 50257),
    "Gemma-3-270m": (640, 2048, 4, 1, 256, 262144),
    "Gemma-3-1B": (1152, 6912, 4, 1, 256, 262144),
    "Gemma-3-4B": (2560, 10240, 8, 4, 256, 262144),
}


@pytest.mark.parametrize("sizes", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("num_sms", [78, 114, 132])
def test_small_models_on_hopper_are_supported(sizes, num_sms):
    shape = StepShape(*sizes, eps=1e-6, softmax_scale=0.1)
    arch = dataclasses.replace(HOPPER, num_sms=num_sms)

    for dtype in (torch.bfloat16, torch.float16):
        assert unsupported(shape, dtype, arch) == ()
    divided = step_sizes(shape, arch)
    assert divided.stages >= 8
    assert divided.group_splits * divided.heads >= shape.num_heads // shape.num_kv_heads
    assert divided.group_splits * shape.num_kv_heads <= num_sms


@pytest.mark.parametrize("sizes", KNOWN.values(), ids=KNOWN)
@pytest.mark.parametrize("scales", ["block", "group"])
def test_small_models_in_fp8_with_blocks_are_supported_for_one_sequence(sizes, scales):
    shape, form = (
        StepShape(*sizes, eps=1e-6, softmax_scale=0.1),
        WeightFormat("fp8", 8, 128, scales),
    )

    assert unsupported(shape, torch.bfloat16, HOPPER, 1, form) == ()
    assert unsupported(shape, torch.bfloat16, HOPPER, 2, form)[0] == "no weights in fp8"


@pytest.mark.parametrize(
    ("group", "why"),
    [
        (64, ("FP8 in groups of 64, not of a multiple of 128",)),
        (192, ("FP8 in groups of 192, not of a multiple of 128",)),
        (96, ("no weights in fp8",)),
        (384, ()),
    ],
)
def test_fp8_in_blocks_of_other_sizes_is_supported_or_refused_by_its_size(group, why):
    form = WeightFormat("fp8", 8, group, "block")

    assert unsupported(QWEN, torch.bfloat16, HOPPER, 1, form) == why


@pytest.mark.parametrize("rows", ROW_COUNTS)
@pytest.mark.parametrize("num_sms", [78, 114, 132])
@pytest.mark.parametrize(
    "name", ["SmolLM2-135M", "SmolLM2-360M", "Qwen2.5-0.5B", "Qwen3-0.6B", "Llama-3.2-1B"]
)
def test_steps_of_several_sequences_of_small_models_are_supported(name, num_sms, rows):
    shape = StepShape(*KNOWN[name], eps=1e-6, softmax_scale=0.1)
    arch = dataclasses.replace(HOPPER, num_sms=num_sms)

    assert unsupported(shape, torch.bfloat16, arch, rows) == ()
    divided = step_sizes(shape, arch, rows, of_rows=True)
    assert divided.inputs % (rows * PARTS * COLUMNS) == 0
    assert divided.inputs >= rows * max(shape.hidden_size, shape.inner_size)
    units = rows * shape.num_kv_heads * divided.group_splits
    assert units * divided.splits // divided.local <= num_sms


def test_every_program_that_attends_has_query_heads():
    for group in range(1, 17):
        for kv_heads in range(1, 9):
            shape = QWEN._replace(num_heads=group * kv_heads, num_kv_heads=kv_heads)
            for num_sms in range(64, 149):
                arch = dataclasses.replace(HOPPER, num_sms=num_sms)
                divided = step_sizes(shape, arch)
                assert (divided.group_splits - 1) * divided.heads < group, (shape, num_sms)


@pytest.mark.parametrize("num_sms", [16, 78, 114, 132])
@pytest.mark.parametrize("sizes", KNOWN.values(), ids=KNOWN)
def test_the_splits_of_a_row_do_not_depend_on_the_number_of_rows(sizes, num_sms):
    shape = StepShape(*sizes, eps=1e-6, softmax_scale=0.1)
    arch = dataclasses.replace(HOPPER, num_sms=num_sms)
    every = [
        step_sizes(shape, arch, rows, of_rows=True)
        for rows in (1, *ROW_COUNTS)
        if not unsupported(shape, torch.bfloat16, arch, rows)
    ]

    assert len({divided.splits for divided in every}) <= 1
    assert all(divided.local == 1 for divided in every[:1])
    assert all(divided.splits % divided.local == 0 for divided in every)


@pytest.mark.parametrize(
    ("shape", "rows", "message"),
    [
        (QWEN._replace(num_kv_heads=16), 8, "114 SMs for 128 groups of query heads; from 128"),
        (QWEN._replace(num_heads=64), 8, "114 SMs for 128 groups of query heads; from 128"),
        (
            QWEN._replace(hidden_size=3072, inner_size=8192),
            8,
            "hold 5 stages beside vectors of 65536 elements, at least 6",
        ),
        (QWEN._replace(inner_size=12288), 8, "hold 1 stages beside vectors of 98304 elements"),
    ],
)
def test_a_reason_against_several_sequences_names_the_value_and_the_limit(shape, rows, message):
    arch = dataclasses.replace(HOPPER, num_sms=114)

    assert unsupported(shape, torch.bfloat16, arch) == ()
    assert message in "; ".join(unsupported(shape, torch.bfloat16, arch, rows))


def test_steps_of_several_sequences_are_only_for_hopper():
    (reason,) = unsupported(QWEN, torch.bfloat16, ARCHES[100], 8)
    assert "needs sm_90, this is sm_100" in reason


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"head_dim": 72}, "head_dim 72 is not a multiple of 16 from 32 to 256"),
        ({"head_dim": 272}, "head_dim 272 is not a multiple of 16 from 32 to 256"),
        ({"hidden_size": 5120}, "a hidden size of 5120, at most 4096"),
        ({"inner_size": 131072}, "hold 0 stages beside vectors of 131072 elements, at least 4"),
        ({"hidden_size": 1000}, "a hidden size of 1000, not a multiple of 64"),
        ({"inner_size": 4000}, "an intermediate size of 4000, not a multiple of 64"),
        ({"num_heads": 20}, "20 query heads for 8 key-value heads"),
        (
            {"num_heads": 160, "num_kv_heads": 160},
            "132 SMs for 160 groups of query heads; from 160 to 256",
        ),
    ],
)
def test_a_reason_names_the_value_and_the_limit(change, message):
    reasons = unsupported(QWEN._replace(**change), torch.bfloat16, HOPPER)

    assert message in "; ".join(reasons)


WEIGHTS_IN_FP8 = FP8_ROWS


@pytest.mark.parametrize("name", [*KNOWN, "Llama-3.1-8B"])
@pytest.mark.parametrize("num_sms", [78, 132])
def test_models_are_supported_up_to_a_hidden_size_of_4096(name, num_sms):
    sizes = {**KNOWN, "Llama-3.1-8B": (4096, 14336, 32, 8, 128, 128256)}[name]
    shape = StepShape(*sizes, eps=1e-6, softmax_scale=0.1)
    arch = dataclasses.replace(HOPPER, num_sms=num_sms)

    assert unsupported(shape, torch.bfloat16, arch, 1, WEIGHTS_IN_FP8) == ()
    assert step_sizes(shape, arch).stages >= 8
    assert step_sizes(shape, arch, of_rows=True).stages >= 8
    assert unsupported(shape, torch.bfloat16, arch) == ()


@pytest.mark.parametrize(
    "change",
    [
        {"post_norms": True}, {"activation": "gelu_tanh"}, {"embedding_factor": 2.0}, {"float32_norms": True},
        {"local_rope": True},
    ],
)  # fmt: skip
def test_what_only_a_step_of_one_sequence_computes_is_no_reason_against_it(change):
    shape = QWEN._replace(**change)

    assert not computed_as_rows(shape)
    assert unsupported(shape, torch.bfloat16, HOPPER) == ()
    (reason,) = unsupported(shape, torch.bfloat16, HOPPER, 2)
    assert reason.endswith("for several sequences")


def test_a_row_of_full_numbers_is_computed_as_one_of_several():
    assert computed_as_rows(QWEN)
    assert not computed_as_rows(QWEN, 1, WEIGHTS_IN_FP8)


def test_several_sequences_are_for_smaller_models_than_one():
    wide = QWEN._replace(hidden_size=4096)
    wider = QWEN._replace(hidden_size=5120)

    assert unsupported(QWEN._replace(hidden_size=2048), torch.bfloat16, HOPPER, 8) == ()
    assert unsupported(
        QWEN._replace(hidden_size=2048), torch.bfloat16, HOPPER, 8, WEIGHTS_IN_FP8
    ) == ("a hidden size of 2048, at most 1536",)
    for weight_format in (None, WEIGHTS_IN_FP8):
        assert unsupported(QWEN, torch.bfloat16, HOPPER, 8, weight_format) == ()
        most = 3072 if weight_format is None else 2048
        assert f"a hidden size of 4096, at most {most}" in unsupported(
            wide, torch.bfloat16, HOPPER, 2, weight_format
        )
        assert unsupported(wide, torch.bfloat16, HOPPER, 1, weight_format) == ()
        assert unsupported(wider, torch.bfloat16, HOPPER, 1, weight_format) == (
            "a hidden size of 5120, at most 4096",
        )
    assert unsupported(QWEN, torch.bfloat16, HOPPER, 1, INT8_ROWS) == ("no weights in int8",)


def test_all_reasons_are_listed():
    shape = QWEN._replace(hidden_size=900, num_heads=20)

    assert len(unsupported(shape, torch.float32, ARCHES[80])) == 4


def test_a_gpu_slice_needs_an_sm_for_each_group_of_query_heads():
    slice_of_it = dataclasses.replace(HOPPER, num_sms=16)
    wide = QWEN._replace(num_kv_heads=32, num_heads=32, head_dim=64, hidden_size=2048)

    assert unsupported(wide, torch.bfloat16, HOPPER) == ()
    assert unsupported(wide, torch.bfloat16, slice_of_it) == (
        "16 SMs for 32 groups of query heads; from 32 to 256",
    )


def test_less_shared_memory_means_fewer_stages():
    assert step_sizes(QWEN, HOPPER).stages == 12
    assert step_sizes(QWEN, ARCHES[120]).stages == 4
    assert unsupported(QWEN, torch.bfloat16, ARCHES[120], unmeasured=True) == ()


@pytest.mark.parametrize("sm", [100, 103, 120, 121])
def test_a_gpu_that_has_never_run_the_kernel_needs_permission(sm):
    arch = dataclasses.replace(ARCHES[120 if sm >= 120 else 100], sm=sm)

    assert unsupported(QWEN, torch.bfloat16, arch) == (NEVER_RUN,)
    assert unsupported(QWEN, torch.bfloat16, arch, unmeasured=True) == ()


def test_query_heads_are_divided_until_all_sms_have_some():
    llama = QWEN._replace(num_heads=32)

    assert step_sizes(llama, HOPPER).group_splits == 2
    assert step_sizes(llama, dataclasses.replace(HOPPER, num_sms=78)).group_splits == 1
    # More heads than a program can attend are divided in any case.
    few = QWEN._replace(num_heads=32, num_kv_heads=2)
    assert step_sizes(few, dataclasses.replace(HOPPER, num_sms=16)).group_splits == 4


def test_unsupported_dtypes_and_gpus_are_named():
    assert unsupported(QWEN, torch.float32, HOPPER) == ("no float32",)
    assert unsupported(QWEN, torch.float32, CATALOGUE["cpu"]) == ("needs a GPU",)
    reasons = unsupported(QWEN, torch.bfloat16, ARCHES[80])
    assert "needs sm_90, sm_100, sm_103, sm_120 or sm_121, this is sm_80" in reasons


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({}, ""),
        ({"mlp_bias": True}, "biases of the MLP"),
        ({"attention_output_bias": True}, "bias of the output projection"),
        ({"sliding_window": 64, "layer_types": ()}, ""),
        ({"post_norms": True}, ""),
        ({"activation": "gelu_tanh"}, ""),
        ({"activation": "gelu"}, "gelu activation"),
        ({"gated_mlp": False}, "MLP without a gate"),
        ({"scale_embeddings": True}, ""),
        ({"norms_add_one": True}, ""),
        (LOCAL_ROPE, ""),
        ({"attention_softcap": 50.0}, "softcap of attention scores"),
        ({"logit_softcap": 30.0}, "softcap of logits"),
    ],
)
def test_unsupported_features_are_named(monkeypatch, change, message):
    monkeypatch.setattr("model.executors.single_launch.shape_unsupported", lambda *_, **__: ())
    model = DecoderLM(changed(CONFIG, **change), torch.bfloat16, "meta")

    assert single_launch.unsupported(model.executors.problem(HOPPER)) == (
        (f"no {message}",) if message else ()
    )


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"post_norms": True}, "norms after attention and MLP"),
        ({"activation": "gelu_tanh"}, "gelu_tanh activation"),
        ({"embedding_factor": 45.0}, "factor on embeddings"),
    ],
)
def test_what_only_the_launch_of_one_sequence_computes_is_named(change, message):
    shape = QWEN._replace(**change)

    assert unsupported(shape, torch.bfloat16, HOPPER) == ()
    assert unsupported(shape, torch.bfloat16, HOPPER, 8) == (f"no {message} for several sequences",)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"norms_add_one": True}, "float32 weights of norms for several sequences"),
        (LOCAL_ROPE, "other rotary embedding for some layers for several sequences"),
    ],
)
def test_what_only_the_model_of_one_sequence_may_have_is_named(monkeypatch, change, message):
    monkeypatch.setattr("model.executors.single_launch.shape_unsupported", lambda *_, **__: ())
    model = DecoderLM(changed(CONFIG, **change), torch.bfloat16, "meta")

    assert single_launch.unsupported(model.executors.problem(HOPPER)) == ()
    assert single_launch.unsupported(model.executors.problem(HOPPER), 8) == (f"no {message}",)


def test_layers_with_a_window_may_have_rotary_tables_of_their_own():
    plain = DecoderLM(CONFIG, torch.bfloat16)
    local = DecoderLM(changed(CONFIG, **LOCAL_ROPE), torch.bfloat16)
    for model in (plain, local):
        model.reserve_positions(20)

    assert plain.rope_tables == plain.ropes[0].tables
    assert local.rope_tables == (*local.ropes[0].tables, *local.ropes[1].tables)
    assert [it[0].theta for it in local.network.rotaries] == [10_000.0, 100.0]


def test_the_step_shape_equals_the_models():
    shape = step_shape(CONFIG.network)

    assert (shape.hidden_size, shape.inner_size, shape.softmax_scale) == (32, 48, 8**-0.5)
    assert shape[-5:] == ("silu", 1.0, False, False, False)
    gemma = changed(CONFIG, activation="gelu_tanh", scale_embeddings=True, post_norms=True)
    assert step_shape(gemma.network)[-5:-2] == ("gelu_tanh", 32**0.5, True)

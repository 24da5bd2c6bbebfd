"""Checkpoints in Hugging Face's FP8: held as they are stored, with the values of the formula."""

import dataclasses

import pytest
import safetensors.torch
import torch

from benchmarks.local_engine import LocalEngine
from kernels.arch import CATALOGUE, CPU
from kernels.cpu.library import load as load_library
from kernels.weight_format import FP8_ROWS, INT4_GROUPS, INT8_GROUPS, WeightFormat
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import resolve_quantization
from model.checkpoint.formats.table import detect
from model.checkpoint.weights import load_model, load_part
from model.errors import ModelError, UnsupportedModelError, WeightsError
from model.executors import cpu_library
from model.families.table import FAMILIES
from model.families.tensors import LLAMA
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.core.start_checks import StartupError
from tests.model.checkpoint import format_samples
from tests.model.checkpoint.hf_checkpoints import CASES, Case
from tests.model.executors.paged import PagedDriver, logits_in_chunks
from tests.model.network.ranks import ThreadRanks

FILE = "model.safetensors"
QUERY = "model.layers.0.self_attn.q_proj.weight"
TOKENS = [(7 * i) % 120 + 2 for i in range(40)]
IN_BLOCKS = [
    "llama", "llama mqa", "qwen3 tied biases", "gemma2", "gemma3", "phi3 partial longrope tied", "stablelm biases tied",
]  # fmt: skip


in_blocks = format_samples.blocks


def store(folder, group=16, keep=(), dtype=torch.float32):
    """Round the matrices of a checkpoint's layers to FP8 in blocks; return a checkpoint of full numbers beside it."""
    described = format_samples.HF_FP8 | {
        "fmt": "e4m3", "weight_block_size": [group, group], "modules_to_not_convert": ["lm_head", *keep],
    }  # fmt: skip
    return format_samples.store(
        folder,
        in_blocks(group),
        "weight_scale_inv",
        described,
        lambda scale: scale.to(dtype),
        keep,
    )


def load(folder, *, kept=True, dtype=torch.float32, pack=False, **options):
    """Load a model; products of packed full numbers may have other bits."""
    config = ModelConfig.from_folder(folder)
    form = config.weight_format if kept else None
    return load_model(folder, config, dtype, "cpu", weight_format=form, pack=pack, **options)


def formats(model):
    return {
        f"{index}.{name}": weight.format
        for index, layer in enumerate(model.decoder_layers)
        for name, weight in layer.matrices.items()
    }


@pytest.mark.parametrize("group", [16, 32, 64, 128])
@pytest.mark.parametrize("case", IN_BLOCKS)
def test_a_model_held_in_blocks_is_the_dequantized_one(tmp_path, case, group):
    CASES[case].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", group)

    held, plain = load(tmp_path / "fp8"), load(exact)

    assert held.weight_format.name == "fp8-blocks"
    for name, form in formats(held).items():
        assert form.bits == 8, name
        assert (form.name, form.group) == ("fp8-blocks", group)
    assert torch.equal(logits_in_chunks(held, TOKENS, 16), logits_in_chunks(plain, TOKENS, 16))


def test_matrices_whose_stacking_divides_blocks_have_scales_for_each_output(tmp_path):
    Case("Llama", {"head_dim": 24}).save(
        tmp_path / "fp8"
    )  # queries 96, keys and values 48 each; gate and up 96
    store(tmp_path / "fp8", 32)

    found = {name: form.scales for name, form in formats(load(tmp_path / "fp8")).items()}

    assert found == {
        f"{layer}.{name}": scales
        for layer in range(2)
        for name, scales in (("qkv", "group"), ("output", "block"), ("gate_up", "block"), ("down", "block"))
    }  # fmt: skip


def test_a_weight_takes_a_byte_and_a_small_part_of_a_scale(tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", 32)

    held, plain = load(tmp_path / "fp8"), load(exact)

    matrices = [it for layer in held.decoder_layers for it in layer.matrices.values()]
    numbers = sum(it.numbers.numel() for it in matrices)
    assert sum(it.numbers.nbytes for it in matrices) == numbers
    scales = sum(it.scale.nbytes for it in matrices)
    assert scales == 4 * numbers / 32**2
    assert plain.weight_bytes - held.weight_bytes == 3 * numbers - scales


@pytest.mark.parametrize("keep", [("layers.0.mlp.down_proj",), ("k_proj",), ("layers.1.",)])
def test_modules_that_are_not_converted_keep_full_numbers(tmp_path, keep):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", 16, keep)

    held, packed = (load(tmp_path / "fp8", pack=pack) for pack in (False, True))

    full = {name for name, form in formats(held).items() if not form.is_quantized}
    assert (
        full
        == {
            "layers.0.mlp.down_proj": {"0.down"},
            "k_proj": {"0.qkv", "1.qkv"},
            "layers.1.": {"1.qkv", "1.output", "1.gate_up", "1.down"},
        }[keep[0]]
    )
    for found, pack in ((held, False), (packed, True)):
        expected = logits_in_chunks(load(exact, pack=pack), TOKENS, 16)
        torch.testing.assert_close(
            logits_in_chunks(found, TOKENS, 16), expected, rtol=1e-5, atol=1e-5
        )


def test_transposed_matrices_are_held_as_full_numbers(tmp_path):
    CASES["gpt2"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8")

    held = load(tmp_path / "fp8")

    assert not held.is_quantized
    assert torch.equal(
        logits_in_chunks(held, TOKENS, 16), logits_in_chunks(load(exact), TOKENS, 16)
    )


@pytest.mark.parametrize("group", [16, 64])
def test_factors_of_a_family_multiply_the_scales(tmp_path, group):
    CASES["granite"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", group)

    held, plain = load(tmp_path / "fp8"), load(exact)

    assert {form.name for form in formats(held).values()} == {"fp8-blocks"}
    found, expected = (logits_in_chunks(it, TOKENS, 16) for it in (held, plain))
    torch.testing.assert_close(found, expected, rtol=1e-5, atol=1e-5)


def fuse(folder, grouped):
    """Store q, k and v as one tensor, and gate and up."""
    tensors = safetensors.torch.load_file(folder / FILE)
    for layer in range(2):
        prefix = f"model.layers.{layer}."
        q, k, v = (tensors.pop(f"{prefix}self_attn.{it}_proj.weight") for it in "qkv")
        parts = [q, k, v]
        if grouped:  # 2 key-value heads of 16, with 2 query heads each
            parts = [
                it for i in (0, 1) for it in (q[32 * i :][:32], k[16 * i :][:16], v[16 * i :][:16])
            ]
        tensors[f"{prefix}self_attn.qkv_proj.weight"] = torch.cat(parts)
        gate_up = [tensors.pop(f"{prefix}mlp.{it}_proj.weight") for it in ("gate", "up")]
        tensors[f"{prefix}mlp.gate_up_proj.weight"] = torch.cat(gate_up)
    safetensors.torch.save_file(tensors, folder / FILE)


@pytest.mark.parametrize("group", [8, 16, 32, 128])
@pytest.mark.parametrize("changes", ["interleaved", "fused", "grouped"])
def test_rows_of_a_family_in_another_order_keep_their_scales(tmp_path, monkeypatch, changes, group):
    CASES["llama"].save(tmp_path / "fp8")
    modules = LLAMA.layer_modules
    if changes != "interleaved":
        fuse(tmp_path / "fp8", grouped=changes == "grouped")
        modules = modules | dict.fromkeys("qkv", "self_attn.qkv_proj")
        modules = modules | dict.fromkeys(("gate", "up"), "mlp.gate_up_proj")
    tensors = dataclasses.replace(
        LLAMA,
        layer_modules=modules,
        interleaved_rotary=changes == "interleaved",
        grouped_qkv=changes == "grouped",
    )
    family = dataclasses.replace(FAMILIES["LlamaForCausalLM"], tensors=tensors)
    monkeypatch.setitem(FAMILIES, "LlamaForCausalLM", family)
    exact = store(tmp_path / "fp8", group)

    held = load(tmp_path / "fp8")

    assert {form.name for form in formats(held).values()} == {"fp8-blocks"}
    if changes == "interleaved":
        assert (formats(held)["0.qkv"].scales == "block") == (group in (16, 32))
    assert torch.equal(
        logits_in_chunks(held, TOKENS, 16), logits_in_chunks(load(exact), TOKENS, 16)
    )


def test_scales_may_be_bfloat16_and_activations_too(tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", dtype=torch.bfloat16)

    found, expected = (load(it, dtype=torch.bfloat16) for it in (tmp_path / "fp8", exact))

    assert found.layers[0].down.scale.dtype is torch.float32
    assert torch.equal(logits_in_chunks(found, TOKENS, 16), logits_in_chunks(expected, TOKENS, 16))


def test_full_numbers_are_loaded_where_no_format_is_asked_for(tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8")

    for (name, found), expected in zip(
        load(tmp_path / "fp8", kept=False).named_parameters(),
        load(exact).parameters(),
        strict=True,
    ):
        assert torch.equal(found, expected), name


@pytest.mark.parametrize(("size", "group"), [(2, 16), (4, 16), (2, 64), (4, 32)])
def test_ranks_hold_their_parts_of_the_blocks(tmp_path, size, group):
    Case("Llama", {"num_key_value_heads": 4}).save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", group)
    steps = [{"a": TOKENS[:9], "b": [5]}, {"a": [3], "b": [7]}]

    def drive(model):
        driver = PagedDriver(model)
        return [driver.step(chunks) for chunks in steps]

    expected = drive(load(exact))
    config = ModelConfig.from_folder(tmp_path / "fp8")

    def compute(communicator):
        options = {"weight_format": config.weight_format, "communicator": communicator}
        model = load_part(tmp_path / "fp8", config, torch.float32, "cpu", **options)
        model.optimize()
        assert all(form.name == "fp8-blocks" for form in formats(model).values())
        return drive(model)

    for found in ThreadRanks(size).run(compute):
        for step, logits in zip(found, expected, strict=True):
            for name, whole in logits.items():
                torch.testing.assert_close(step[name], whole, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize("form", [INT8_GROUPS, INT4_GROUPS], ids=lambda it: it.name)
def test_the_c_library_gets_the_dequantized_values(tmp_path, form):
    if isinstance(reason := load_library(), str):
        pytest.skip(reason)
    Case("Llama", {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}).save(
        tmp_path / "fp8"
    )
    exact = store(tmp_path / "fp8", 64)
    assert not cpu_library.unsupported(ModelConfig.from_folder(exact).network)
    packed = []
    for folder in (tmp_path / "fp8", exact):
        model = load(folder)
        model.optimize(form)
        layers = model.executors.cpu_library._decoder._held[0]
        packed.append([part for layer in layers for it in layer[:4] for part in it._tensors])

    assert len(packed[0]) > 8
    assert all(map(torch.equal, *packed))


def engine(folder, **changes):
    given = {
        "model_path": str(folder), "model_id": "tiny", "device": "cpu", "dtype": "float32", "max_model_len": 256,
        "kv_cache_tokens": 4096, "cpu_threads": 1,
    }  # fmt: skip
    return LocalEngine(EngineConfig(**given | changes))


@pytest.mark.parametrize("quantization", ["auto", "none"])
def test_an_engine_serves_the_format_and_tells_its_name(tmp_path, caplog, quantization):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8")
    requests = [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=TOKENS[: 3 + i],
            sampling=SamplingParams(max_new_tokens=20, temperature=0.9 * (i % 2), seed=i),
        )
        for i in range(4)
    ]

    served, plain = engine(tmp_path / "fp8", quantization=quantization), engine(exact)

    assert served.engine.info.quantization == "fp8-blocks"
    assert served.engine.info.plan.weight_dtype == "fp8-blocks"
    assert plain.engine.info.quantization == "none"
    assert "every step converts the weights from fp8-blocks" in caplog.text
    found, expected = (
        [[event.token_id for event in events] for events in it.generate(list(requests))]
        for it in (served, plain)
    )
    assert found == expected


def test_an_engine_refuses_to_round_the_weights_twice(tmp_path):
    form = in_blocks(128)
    for arch in (CATALOGUE["h100"], CATALOGUE["a100"]):
        with pytest.raises(
            ModelError, match=r"quantized already, as fp8-blocks, .* to none or auto"
        ):
            resolve_quantization("fp8", arch, "auto", tuple, form)
        assert resolve_quantization("auto", arch, "auto", tuple, form) == form
    assert resolve_quantization("auto", CPU, "auto", tuple, form) == form
    assert resolve_quantization("int8", CPU, "auto", tuple, form) == INT8_GROUPS
    CASES["llama"].save(tmp_path / "fp8")
    store(tmp_path / "fp8")
    with pytest.raises(StartupError, match="weights in FP8 are for our GPU kernels"):
        engine(tmp_path / "fp8", quantization="fp8")


def test_dummy_weights_are_in_the_format(tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    store(tmp_path / "fp8", 64)

    held = load(tmp_path / "fp8", load_format="dummy")

    assert {form.name for form in formats(held).values()} == {"fp8-blocks"}
    std = float(held.layers[0].down.weight.dequantize().std())
    assert std == pytest.approx(held.config.initializer_range, rel=0.05)


def described(**changes):
    return {
        "quantization_config": {"quant_method": "fp8", "weight_block_size": [128, 128]} | changes
    }


def test_what_does_not_change_the_weights_is_accepted():
    for changes in (
        {},
        {"activation_scheme": "dynamic", "fmt": "e4m3", "scale_fmt": "float"},
        {"activation_scheme": "static", "scale_fmt": "ue8m0", "expert_dtype": "fp8"},
        {"modules_to_not_convert": ["lm_head", "model.layers.0.input_layernorm"]},
        {"ignored_layers": None, "activation_scheme": None},
    ):
        assert detect(described(**changes)) == in_blocks(128)
    assert detect(described(weight_block_size=[64, 64])) == in_blocks(64)
    assert detect(described(weight_block_size=[1, 64])) == WeightFormat(
        "fp8-groups", 8, 64, "group"
    )
    assert detect(described(weight_block_size=None)) == FP8_ROWS


def test_scales_may_be_powers_of_two_in_a_byte(tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    exact = store(tmp_path / "fp8", dtype=torch.float8_e8m0fnu)

    held, plain = load(tmp_path / "fp8"), load(exact)

    assert held.layers[0].down.scale.dtype is torch.float32
    assert torch.equal(logits_in_chunks(held, TOKENS, 16), logits_in_chunks(plain, TOKENS, 16))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"quant_method": "other"}, r"quant_method = 'other' is not supported; supported is 'compressed-tensors' or"),
        ({"weight_block_size": [64, 128]}, r"weight_block_size = \[64, 128\] is not supported; supported are null, sq"),
        ({"weight_block_size": [1, 0]}, r"weight_block_size = \[1, 0\]"),
        ({"weight_block_size": 128}, "weight_block_size = 128"),
        ({"weight_block_size": [0, 0]}, r"\[0, 0\] must be whole numbers from 1 to 65536"),
        ({"weight_block_size": [True, True]}, r"\[True, True\] must be whole numbers"),
        ({"weight_block_size": ["a", "a"]}, r"\['a', 'a'\] must be whole numbers"),
        ({"activation_scheme": "other"}, "activation_scheme = 'other'"),
        ({"fmt": "e5m2"}, "fmt = 'e5m2'"),
        ({"scale_fmt": "other"}, "scale_fmt = 'other'"),
        ({"expert_dtype": "fp4"}, "expert_dtype = 'fp4'"),
    ],
)  # fmt: skip
def test_other_formats_are_refused_by_name(changes, message):
    with pytest.raises(UnsupportedModelError, match=f"quantization_config.*{message}"):
        detect(described(**changes))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda t: t.pop(f"{QUERY}_scale_inv"), f"{QUERY} is float8_e4m3fn with 64 rows, .* there are none"),
        (lambda t: t.update({f"{QUERY}_scale_inv": torch.ones(4, 3)}), r"must be \[4, 4\] scales, .* is \[4, 3\] F32"),
        (lambda t: t.update({f"{QUERY}_scale_inv": torch.ones(4, 4).to(torch.float8_e4m3fn)}), r"is \[4, 4\] F8_E4M3"),
        (lambda t: t.update({QUERY: t[QUERY].float()}), f"{QUERY}_scale_inv belongs to no float8_e4m3fn tensor"),
        (lambda t: t.update({"model.norm.weight": torch.ones(64).to(torch.float8_e4m3fn)}), "only matrices may be"),
        (lambda t: t.update({QUERY: t[QUERY].view(torch.int8)}), "stored as I8; supported are F32, BF16, F16, F8_E4M3"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_named(change, message, tmp_path):
    CASES["llama"].save(tmp_path / "fp8")
    store(tmp_path / "fp8")
    tensors = safetensors.torch.load_file(tmp_path / "fp8" / FILE)
    change(tensors)
    safetensors.torch.save_file(tensors, tmp_path / "fp8" / FILE)

    with pytest.raises(WeightsError, match=message):
        load(tmp_path / "fp8")

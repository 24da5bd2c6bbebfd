"""Checkpoints that compressed-tensors has written: held as they are stored, with the library's own values."""

import pytest
import torch
from safetensors.torch import load_file

from benchmarks.local_engine import LocalEngine
from benchmarks.parity import compared
from kernels.arch import CATALOGUE, CPU
from kernels.cpu.library import load as load_library
from kernels.weight_format import FP8_ROWS, INT8_GROUPS, WeightFormat
from model.checkpoint.config import ModelConfig
from model.checkpoint.dtypes import resolve_quantization
from model.checkpoint.formats.int_quantized import compress as int8_rows
from model.checkpoint.formats.table import detect, stored_formats
from model.checkpoint.weights import load_model, load_part
from model.device.quantizations import is_for_library
from model.errors import ModelError, UnsupportedModelError, WeightsError
from model.executors import single_launch
from server.engine.core.messages import EngineConfig
from tests.model.checkpoint import format_samples
from tests.model.checkpoint.compressed import (
    FILE,
    arguments,
    change_tensors,
    compress,
    group,
    write_config,
)
from tests.model.checkpoint.hf_checkpoints import CASES, Case
from tests.model.executors.paged import PagedDriver, logits_in_chunks
from tests.model.network.ranks import ThreadRanks

TOKENS = [(7 * i) % 120 + 2 for i in range(40)]
QUERY = "model.layers.0.self_attn.q_proj"
ROUNDED_ACTIVATIONS = {
    "num_bits": 8, "type": "int", "symmetric": True, "strategy": "token", "dynamic": True,
}  # fmt: skip
FP8 = {"type": "float"}
INT = "int-quantized"
FLOAT = "float-quantized"
KINDS = {
    "int channel": (INT, arguments(), "int8-rows"),
    "int tensor": (INT, arguments(strategy="tensor"), "int8-rows"),
    "int group": (INT, arguments(strategy="group", group_size=32), "int8-groups"),
    "int channel asymmetric": (INT, arguments(symmetric=False), "int8-rows-asymmetric"),
    "int tensor asymmetric": (INT, arguments(symmetric=False, strategy="tensor"), "int8-rows-asymmetric"),
    "int group asymmetric": (
        INT, arguments(symmetric=False, strategy="group", group_size=16), "int8-groups-asymmetric",
    ),
    "int 5 bits": (INT, arguments(num_bits=5), "int8-rows"),
    "fp8 tensor": (FLOAT, arguments(**FP8, strategy="tensor"), "float8_e4m3fn"),
    "fp8 channel": (FLOAT, arguments(**FP8), "float8_e4m3fn"),
    "fp8 group": (FLOAT, arguments(**FP8, strategy="group", group_size=32), "fp8-groups"),
    "fp8 blocks": (FLOAT, arguments(**FP8, strategy="block", block_structure=[32, 32]), "fp8-blocks"),
    "fp8 blocks that do not divide": (
        FLOAT, arguments(**FP8, strategy="block", block_structure=[40, 40]), "fp8-blocks",
    ),
    "fp8 blocks of a row": (FLOAT, arguments(**FP8, strategy="block", block_structure=[1, 32]), "fp8-groups"),
    "naive int": ("naive-quantized", arguments(), "int8-rows"),
    "naive fp8": ("naive-quantized", arguments(**FP8), "float8_e4m3fn"),
}  # fmt: skip


def load(folder, *, dtype=torch.float32, pack=False, **options):
    config = ModelConfig.from_folder(folder)
    form = config.weight_format
    return load_model(folder, config, dtype, "cpu", weight_format=form, pack=pack, **options)


def stored(tmp_path, kind, case="llama", **options):
    """Save a compressed checkpoint; return its folder and that of the library's dequantized weights."""
    form, weights, _ = KINDS[kind]
    (CASES[case] if isinstance(case, str) else case).save(tmp_path / "it")
    exact = compress(tmp_path / "it", {"group_0": group(weights)}, form, **options)
    return tmp_path / "it", exact


def names(model):
    return {
        f"{index}.{name}": weight.format.name
        for index, layer in enumerate(model.decoder_layers)
        for name, weight in layer.matrices.items()
    }


def logits(model):
    return logits_in_chunks(model, TOKENS, 16)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_holds_what_is_stored_and_computes_with_the_values_of_the_library(tmp_path, kind):
    folder, exact = stored(tmp_path, kind)

    held, plain = load(folder), load(exact)

    assert set(names(held).values()) == {KINDS[kind][2]}
    assert all(
        it.numbers.element_size() == 1
        for layer in held.decoder_layers
        for it in layer.matrices.values()
    )
    torch.testing.assert_close(logits(held), logits(plain), rtol=1e-4, atol=1e-4)


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(
    "case",
    [
        "qwen3 tied biases",
        "gemma2",
        "phi3 partial longrope tied",
        "granite",
        "llama head_dim",
        "stablelm",
    ],
)
def test_other_families_hold_the_formats_too(tmp_path, kind, case):
    folder, exact = stored(tmp_path, kind, case)

    held, plain = load(folder), load(exact)

    assert held.is_quantized
    torch.testing.assert_close(logits(held), logits(plain), rtol=1e-4, atol=1e-4)


def test_a_scale_for_a_matrix_or_an_output_is_the_format_that_kernels_for_fp8_read(tmp_path):
    for number, kind in enumerate(("fp8 tensor", "fp8 channel")):
        folder, _ = stored(tmp_path / str(number), kind, scale_dtype=torch.bfloat16)

        held = load(folder, dtype=torch.bfloat16)

        assert held.weight_format == FP8_ROWS
        assert held.other_formats == ()
        assert held.layers[0].qkv.weight.scale.shape == (128,)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize(
    "kind", ["int group asymmetric", "fp8 tensor", "fp8 blocks that do not divide"]
)
def test_ranks_hold_their_parts(tmp_path, size, kind):
    folder, exact = stored(tmp_path, kind, Case("Llama", {"num_key_value_heads": 4}))
    steps = [{"a": TOKENS[:9], "b": [5]}, {"a": [3], "b": [7]}]

    def drive(model):
        driver = PagedDriver(model)
        return [driver.step(chunks) for chunks in steps]

    expected = drive(load(exact))
    config = ModelConfig.from_folder(folder)

    def compute(communicator):
        options = {"weight_format": config.weight_format, "communicator": communicator}
        model = load_part(folder, config, torch.float32, "cpu", **options)
        model.optimize()
        assert set(names(model).values()) == {KINDS[kind][2]}
        return drive(model)

    for found in ThreadRanks(size).run(compute):
        for step, its in zip(found, expected, strict=True):
            for name, whole in its.items():
                torch.testing.assert_close(step[name], whole, rtol=2e-4, atol=2e-4)


@pytest.mark.parametrize(
    ("ignore", "full"),
    [
        (("lm_head", "model.layers.1.mlp.down_proj"), {"1.down"}),
        (("lm_head", r"re:.*layers\.0\..*"), {"0.qkv", "0.output", "0.gate_up", "0.down"}),
        ((), set()),
    ],
)
def test_ignored_modules_keep_full_numbers_and_the_head_may_be_stored_so_too(
    tmp_path, ignore, full
):
    folder, exact = stored(tmp_path, "fp8 channel", ignore=ignore)

    held = load(folder)

    assert {name for name, form in names(held).items() if form == "float32"} == full
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)
    assert held.head.format.is_quantized == ("lm_head" not in ignore)


def test_a_single_launch_needs_all_matrices_in_one_format(tmp_path):
    shape = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_attention_heads": 2,
             "num_key_value_heads": 1}  # fmt: skip
    folder, _ = stored(
        tmp_path, "fp8 channel", Case("Llama", shape), ignore=("lm_head", "re:.*1.mlp.down_proj")
    )

    held = load(folder, dtype=torch.bfloat16)

    problem = held.executors.problem(CATALOGUE["h100"])
    assert [it.name for it in problem.other_formats] == ["bfloat16"]
    assert "matrices in several formats: float8_e4m3fn, bfloat16" in single_launch.unsupported(
        problem
    )


def test_embeddings_may_be_stored_so_too(tmp_path):
    folder, exact = stored(tmp_path, "int channel", ignore=())

    def round_embeddings(tensors):
        numbers, scale = int8_rows(tensors["model.embed_tokens.weight"])
        tensors |= {"model.embed_tokens.weight": numbers, "model.embed_tokens.weight_scale": scale}

    def dequantized(tensors):
        numbers, scale = int8_rows(tensors["model.embed_tokens.weight"])
        tensors["model.embed_tokens.weight"] = numbers.float() * scale

    change_tensors(folder, round_embeddings)
    change_tensors(exact, dequantized)

    held = load(folder)

    assert held.embedding.format.name == "int8-rows"
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("inputs", [48, 40])
def test_groups_need_not_divide_the_inputs(tmp_path, inputs):
    shape = {"hidden_size": inputs, "intermediate_size": 72, "head_dim": 8}
    Case("Llama", shape).save(tmp_path / "it")
    form = WeightFormat("fp8-groups", 8, 32, "group")
    keys = {"quant_method": "fp8", "weight_block_size": [1, 32]}
    exact = format_samples.store(tmp_path / "it", form, "weight_scale_inv", keys)

    held = load(tmp_path / "it")

    assert held.layers[0].qkv.weight.scale.shape[1] == 2
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)


def test_groups_of_modules_are_stored_in_ways_of_their_own(tmp_path):
    CASES["llama"].save(tmp_path / "it")
    groups = {
        "group_0": group(arguments(**FP8), [r"re:.*self_attn\.(q|k|v|o)_proj$"], format=FLOAT),
        "group_1": group(arguments(strategy="group", group_size=32), ["Linear"], format=INT),
        "group_2": group(arguments(), ["model.layers.0.mlp.down_proj"], format=INT),
    }
    exact = compress(tmp_path / "it", groups, "mixed-precision")

    held = load(tmp_path / "it")

    found = {
        name: (it.format.name, it.format.scales) for name, it in held.layers[0].matrices.items()
    }
    assert found == {
        "qkv": ("float8_e4m3fn", "row"), "output": ("float8_e4m3fn", "row"), "gate_up": ("int8-groups", "group"),
        "down": ("int8-rows", "row"),
    }  # fmt: skip
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)
    served = engine(tmp_path / "it", dtype="float32")
    assert served.engine.info.quantization == "fp8, int8-groups, int8-rows"


def test_a_module_that_no_group_names_is_an_error(tmp_path):
    CASES["llama"].save(tmp_path / "it")
    groups = {
        "a": group(arguments(), [r"re:.*self_attn.*"], format=INT),
        "b": group(arguments(strategy="group", group_size=32), ["re:.*mlp.*"], format=INT),
    }
    compress(tmp_path / "it", groups, INT)
    groups["b"]["targets"] = ["re:.*gate_proj"]
    described = {"quant_method": "compressed-tensors", "format": INT, "config_groups": groups}
    write_config(tmp_path / "it", quantization_config=described)

    with pytest.raises(
        WeightsError, match=r"down_proj is quantized, but is no target of config_groups"
    ):
        load(tmp_path / "it")


def test_tensors_that_round_activations_and_the_cache_are_not_used_and_the_log_says_so(
    tmp_path, caplog
):
    keys = {
        "kv_cache_scheme": {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    }
    folder, exact = stored(tmp_path, "fp8 tensor", **keys)
    static = {"num_bits": 8, "type": "float", "strategy": "tensor", "dynamic": False}
    groups = {"group_0": group(KINDS["fp8 tensor"][1]) | {"input_activations": static}}
    described = {
        "quant_method": "compressed-tensors",
        "format": FLOAT,
        "config_groups": groups,
        **keys,
    }
    write_config(folder, quantization_config=described)

    def add(tensors):
        tensors[f"{QUERY}.input_scale"] = torch.ones(1)
        tensors["model.layers.0.self_attn.k_scale"] = torch.ones(())
        tensors["model.layers.1.self_attn.v_scale"] = torch.ones(1, dtype=torch.bfloat16)

    change_tensors(folder, add)

    held = load(folder)

    assert "activations are not rounded as the checkpoint states" in caplog.text
    assert "kv_cache_scheme has no effect" in caplog.text
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)


def test_zero_points_of_symmetric_matrices_are_0(tmp_path):
    folder, exact = stored(tmp_path, "int channel")
    name = f"{QUERY}.weight_zero_point"
    change_tensors(folder, lambda it: it.update({name: torch.zeros(64, 1, dtype=torch.int8)}))
    assert torch.equal(logits(load(folder)), logits(load(exact)))

    change_tensors(folder, lambda it: it[name].__setitem__(3, 1))

    with pytest.raises(
        WeightsError, match=r"q_proj\.weight has zero points other than 0, .* symmetric = true"
    ):
        load(folder)


def test_zero_points_of_asymmetric_matrices_must_be_there(tmp_path):
    folder, _ = stored(tmp_path, "int channel asymmetric")
    change_tensors(folder, lambda it: it.pop(f"{QUERY}.weight_zero_point"))

    with pytest.raises(
        WeightsError, match=r"q_proj\.weight is int8 with 64 rows, whose zero points are missing"
    ):
        load(folder)


def test_dequantize_asks_for_full_numbers(tmp_path):
    folder, exact = stored(tmp_path, "int channel", dequantize=True)

    assert ModelConfig.from_folder(folder).weight_format is None
    held = load(folder)

    assert not held.is_quantized
    assert torch.equal(logits(held), logits(load(exact)))


@pytest.mark.parametrize("arch", [CPU, CATALOGUE["h100"]], ids=["cpu", "h100"])
def test_a_service_keeps_the_numbers_of_a_checkpoint(arch):
    rows = WeightFormat("int8-rows", 8, scales="row", float=False)
    groups = WeightFormat("int8-groups", 8, 32, "group", float=False)

    for form in (rows, groups, FP8_ROWS):
        assert resolve_quantization("none", arch, "auto", tuple, form) == form
        assert resolve_quantization("auto", arch, "auto", lambda: ("no library",), form) == form
        for dtype in ("auto", "float32"):
            assert resolve_quantization("auto", arch, dtype, tuple, form) == form
            in_library = arch.is_cpu and dtype == "auto" and form != FP8_ROWS
            assert is_for_library(form, arch, dtype, tuple) == in_library
    if not arch.is_cpu:
        assert resolve_quantization("fp8", arch, "auto", tuple, FP8_ROWS) == FP8_ROWS
        with pytest.raises(ModelError, match="quantized already, as int8-rows"):
            resolve_quantization("fp8", arch, "auto", tuple, rows)


def engine(folder, **changes):
    given = {
        "model_path": str(folder), "model_id": "tiny", "device": "cpu", "max_model_len": 256, "kv_cache_tokens": 4096,
        "cpu_threads": 1,
    }  # fmt: skip
    return LocalEngine(EngineConfig(**given | changes))


@pytest.mark.parametrize(("changes", "held"), [({}, "int8-rows"), ({"dequantize": True}, "int8")])
def test_a_service_multiplies_by_the_numbers_of_the_checkpoint_in_the_c_library(
    tmp_path, changes, held
):
    if isinstance(reason := load_library(), str):
        pytest.skip(reason)
    shape = {"hidden_size": 128, "intermediate_size": 192, "head_dim": 32}
    folder, exact = stored(tmp_path, "int channel", Case("Llama", shape), **changes)
    config = ModelConfig.from_folder(folder)
    assert config.stored_format.name == "int8-rows"

    # The smallest number has no positive counterpart: rounding again would change all numbers of its row.
    def change(tensors):
        tensors[f"{QUERY}.weight"][:, 0] = -128

    change_tensors(folder, change)
    scale = load_file(folder / FILE)[f"{QUERY}.weight_scale"]
    change_tensors(
        exact, lambda it: it[f"{QUERY}.weight"].__setitem__((slice(None), 0), -128 * scale[:, 0])
    )

    found = compared(folder, exact, 12, quantization="auto", dtype="auto")
    model = load_model(
        folder, config, torch.float32, "cpu", pack=False, weight_format=config.stored_format
    )
    model.optimize(INT8_GROUPS)
    query = model.executors.cpu_library._decoder._held[0][0].qkv

    assert found.held == held
    assert found.tokens >= 1
    assert found.difference < 0.3
    assert query.format == config.stored_format


@pytest.mark.parametrize(
    ("kind", "name"),
    [("int group", "int8-groups"), ("fp8 tensor", "fp8"), ("fp8 blocks", "fp8-blocks")],
)
def test_a_service_tells_the_name_of_the_format(tmp_path, kind, name):
    folder, _ = stored(tmp_path, kind)

    info = engine(folder, dtype="float32").engine.info

    assert info.quantization == name


CONFIG = {"quant_method": "compressed-tensors", "format": INT}
WEIGHTS = "config_groups.group_0.weights"


def described(weights=None, **changes):
    groups = {"group_0": group(weights or arguments())}
    return {"quantization_config": CONFIG | {"config_groups": groups} | changes}


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (described(arguments(type="uint")), rf"{WEIGHTS}\.type = 'uint' is not supported; supported is 'int' or 'fl"),
        (described(arguments(**FP8)), rf"{WEIGHTS}\.type = 'float' is not supported; supported is 'int'"),
        (described(arguments(), format=FLOAT), rf"{WEIGHTS}\.type = 'int' is not supported; supported is 'float'"),
        (described(arguments(**FP8, num_bits=6), format=FLOAT), rf"{WEIGHTS}\.num_bits = 6 .* supported is 8"),
        (described(arguments(**FP8, symmetric=False), format=FLOAT), rf"{WEIGHTS}\.symmetric = False"),
        (described(arguments(strategy="tensor_group")), rf"{WEIGHTS}\.strategy = 'tensor_group' .* 'tensor' or 'ch"),
        (described(arguments(strategy="block", block_structure=[8, 8])), rf"{WEIGHTS}\.strategy = 'block'"),
        (described(arguments(dynamic=True)), rf"{WEIGHTS}\.dynamic = True"),
        (
            described(arguments(**FP8, strategy="block", block_structure=[64, 128]), format=FLOAT),
            r"block_structure = \[64, 128\] is not supported; supported are squares",
        ),
        (described(format="mixed-precision"), "group_0 has no format, which each group needs"),
        (described(format="unknown"), r"quantization_config\.format = 'unknown' is not supported; supported is 'int-q"),
        (described(format=None), r"quantization_config\.format = None"),
        (described(sparsity_config={"format": "sparse-24-bitmask"}), r"sparsity_config\.format = 'sparse-24-bitm"),
        (described(transform_config={"config_groups": {}}), "transform_config"),
        (described(config_groups={"W8A8": ["Linear"]}), r"config_groups\.W8A8 must be an object"),
        (described(config_groups={"g": {"weights": None, "targets": ["Linear"]}}), r"g\.weights must be an object"),
    ],
)  # fmt: skip
def test_what_is_not_read_is_refused_by_name(config, message):
    with pytest.raises(UnsupportedModelError, match=message):
        detect(config)


@pytest.mark.parametrize(
    ("weights", "message"),
    [
        (arguments(num_bits="8"), "num_bits must be a whole number"),
        (arguments(num_bits=16), "num_bits must be a whole number <= 8"),
        (arguments(strategy="group"), "group_size must be a whole number"),
        (arguments(strategy="group", group_size=0), "group_size must be a whole number >= 1"),
        (arguments(symmetric=1), "symmetric must be true or false"),
        (arguments(**FP8, strategy="block", block_structure="axb"), "block_structure"),
        (arguments(**FP8, strategy="block"), "block_structure must be"),
        (arguments(**FP8, strategy="block", block_structure="9" * 5000 + "x1"), "block_structure"),
    ],
)
def test_values_of_a_wrong_type_or_size_are_named(weights, message):
    with pytest.raises(ModelError, match=message):
        detect(described(weights))


def test_older_configurations_are_read():
    rows = WeightFormat("int8-rows", 8, scales="row", float=False)
    old = described(quantization_status="frozen")["quantization_config"]
    assert detect({"compression_config": old}) == rows
    del old["quant_method"]
    assert detect({"compression_config": old}) == rows
    nested = {
        "quant_method": "compressed-tensors",
        "quantization_config": old,
        "sparsity_config": {"format": "dense"},
    }
    assert detect({"compression_config": nested}) == rows
    blocks = arguments(**FP8, strategy="block", block_structure="128x128")
    assert detect(described(blocks, format=FLOAT)) == WeightFormat("fp8-blocks", 8, 128, "block")
    assert detect(described({"num_bits": 8, "group_size": -1})) == rows
    assert detect(described({"num_bits": 8, "group_size": 64})).group == 64


def test_a_checkpoint_whose_cache_alone_is_rounded_has_full_numbers():
    config = described(config_groups={}, kv_cache_scheme={"num_bits": 8})

    assert detect(config) is None
    assert "--kv-cache-dtype fp8" in stored_formats(config).notes[0]


def test_a_group_may_round_activations_alone():
    groups = {
        "attention": {"targets": ["LlamaAttention"], "weights": None, "input_activations": ROUNDED_ACTIVATIONS},
        "linear": group(arguments(), input_activations=ROUNDED_ACTIVATIONS) | {"output_activations": None},
    }  # fmt: skip

    assert detect(described(config_groups=groups)).name == "int8-rows"


def test_dummy_weights_are_in_the_format(tmp_path):
    folder, _ = stored(tmp_path, "fp8 channel")

    held = load(folder, load_format="dummy")

    assert held.weight_format == FP8_ROWS

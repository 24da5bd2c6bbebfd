"""AWQ, GPTQ and pack-quantized checkpoints: held as they are stored, with the values of the formats' formulas."""

import json

import pytest
import safetensors.torch
import torch

from benchmarks.parity import compared
from kernels.arch import CATALOGUE
from kernels.cpu.library import load as load_library
from kernels.cpu.matrix import PackedMatrix
from kernels.weight_format import INT4_GROUPS, INT8_ROWS, unquantized
from model.checkpoint.config import ModelConfig
from model.checkpoint.formats.table import detect
from model.checkpoint.weights import load_model, load_part
from model.errors import ModelError, UnsupportedModelError, WeightsError
from model.executors import single_launch
from tests.model.checkpoint.hf_checkpoints import CASES, Case
from tests.model.checkpoint.packed_checkpoints import (
    FILE,
    awq_checkpoint,
    gptq_checkpoint,
    packed,
    packed_checkpoint,
)
from tests.model.executors.paged import PagedDriver, logits_in_chunks
from tests.model.network.ranks import ThreadRanks

TOKENS = [(7 * i) % 120 + 2 for i in range(40)]
QUERY = "model.layers.0.self_attn.q_proj"
ODD = Case("Llama", {"hidden_size": 56, "intermediate_size": 88, "head_dim": 24})
"""Of inputs that no group of 32 divides."""
ODD_WORDS = Case("Llama", {"hidden_size": 60, "intermediate_size": 44, "head_dim": 10})
"""Of sizes that no word divides."""
KINDS = {
    f"{name} {text} {group}": (save, {"group": group} | options)
    for name, save, variants in (
        ("awq", awq_checkpoint, {"": {}, "symmetric": {"zero_point": False}}),
        (
            "gptq",
            gptq_checkpoint,
            {
                "": {},
                "asymmetric": {"sym": False},
                "8 bits": {"bits": 8},
                "8 bits asymmetric": {"bits": 8, "sym": False},
                "act-order": {"act_order": True},
                "act-order asymmetric": {"act_order": True, "sym": False},
                "act-order 8 bits": {"act_order": True, "bits": 8},
                "v2": {"version": 2, "sym": False},
                "bfloat16": {"dtype": torch.bfloat16},
                "bfloat16 asymmetric": {"dtype": torch.bfloat16, "sym": False},
                "float32": {"dtype": torch.float32},
            },
        ),
        (
            "w4a16",
            packed_checkpoint,
            {
                "": {},
                "asymmetric": {"symmetric": False},
                "8 bits": {"bits": 8},
                "8 bits asymmetric": {"bits": 8, "symmetric": False},
                "act-order": {"act_order": True},
                "act-order asymmetric": {"act_order": True, "symmetric": False},
            },
        ),
    )
    for text, options in variants.items()
    for group in ((32, 64, 128) if options.get("act_order") else (32, 64, 128, -1))
}


def saved(tmp_path, kind, case="llama", **changes):
    """Save a checkpoint of a kind; return its folder and that of the same values as full numbers."""
    save, options = KINDS[kind]
    (CASES[case] if isinstance(case, str) else case).save(tmp_path / "it")
    return tmp_path / "it", save(tmp_path / "it", **options | changes)


def load(folder, *, kept=True, dtype=torch.float32, pack=False, **options):
    config = ModelConfig.from_folder(folder)
    form = config.weight_format if kept else None
    return load_model(folder, config, dtype, "cpu", weight_format=form, pack=pack, **options)


def formats(model):
    return {
        f"{index}.{name}": weight.format
        for index, layer in enumerate(model.decoder_layers)
        for name, weight in layer.matrices.items()
    }


def logits(model):
    return logits_in_chunks(model, TOKENS, 16)


def assert_equal_logits(held, plain):
    """Of an order the products are sums in another order."""
    if any(form.ordered for form in formats(held).values()):
        torch.testing.assert_close(logits(held), logits(plain), rtol=2e-5, atol=2e-5)
    else:
        assert torch.equal(logits(held), logits(plain))


def change(folder, **changes):
    """Change keys of quantization_config."""
    file = folder / "config.json"
    config = json.loads(file.read_text())
    config["quantization_config"] |= changes
    file.write_text(json.dumps(config))


def change_tensors(folder, edit):
    tensors = safetensors.torch.load_file(folder / FILE)
    edit(tensors)
    safetensors.torch.save_file(tensors, folder / FILE)


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_holds_what_is_stored_and_computes_with_the_values_of_the_formula(tmp_path, kind):
    folder, exact = saved(tmp_path, kind)

    held, plain = load(folder), load(exact)

    options = KINDS[kind][1]
    for form in formats(held).values():
        assert form.bits == options.get("bits", 4)
        assert form.shifts == ("asymmetric" in kind or "v2" in kind or kind.startswith("awq  "))
        assert options["group"] in (form.group, -1)
    if options["group"] == 32:
        assert {it.ordered for it in formats(held).values()} == {"act-order" in kind}
    assert_equal_logits(held, plain)


@pytest.mark.slow
@pytest.mark.parametrize("kind", [it for it in KINDS if it.endswith((" 32", "-1"))])
@pytest.mark.parametrize(
    "case",
    [ODD, "qwen3 tied biases", "gemma2", "phi3 partial longrope tied", "granite", "stablelm"],
    ids=str,
)
def test_other_families_and_sizes_hold_the_formats_too(tmp_path, kind, case):
    folder, exact = saved(tmp_path, kind, case)

    held, plain = load(folder), load(exact)

    assert all(form.is_quantized for form in formats(held).values())
    torch.testing.assert_close(logits(held), logits(plain), rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize(
    "kind", ["w4a16  32", "w4a16 asymmetric 32", "w4a16 8 bits asymmetric -1", "w4a16 act-order 32"]
)
def test_words_that_are_not_full_hold_the_last_numbers(tmp_path, kind):
    folder, exact = saved(tmp_path, kind, ODD_WORDS)

    assert_equal_logits(load(folder), load(exact))


@pytest.mark.parametrize("kind", ["awq  32", "gptq act-order 32", "w4a16 asymmetric 32"])
def test_full_numbers_are_loaded_where_no_format_is_asked_for(tmp_path, kind):
    folder, exact = saved(tmp_path, kind)

    found, expected = load(folder, kept=False), load(exact)

    for (name, parameter), wanted in zip(
        found.named_parameters(), expected.parameters(), strict=True
    ):
        assert torch.equal(parameter, wanted), name


@pytest.mark.parametrize(
    ("kind", "dtype"),
    [
        ("awq  32", "float32"),
        ("awq symmetric 32", "float16"),
        ("gptq  32", "float16"),
        ("gptq asymmetric 32", "float32"),
        ("gptq bfloat16 32", "bfloat16"),
        ("gptq float32 32", "float32"),
        ("w4a16  32", "bfloat16"),
        ("w4a16 asymmetric 32", "float32"),
    ],
)
def test_scales_have_the_dtype_of_the_file_unless_zero_points_need_more_digits(
    tmp_path, kind, dtype
):
    folder, _ = saved(tmp_path, kind)

    assert {form.scale_dtype for form in formats(load(folder)).values()} == {dtype}


def test_4_bit_matrices_with_a_scale_for_a_row_have_groups_that_kernels_read(tmp_path):
    case = Case("Llama", {"hidden_size": 128, "intermediate_size": 96, "head_dim": 32})
    folder, exact = saved(tmp_path, "gptq  -1", case)

    held = load(folder)

    assert {name: form.group for name, form in formats(held).items() if name[0] == "0"} == {
        "0.qkv": 128, "0.output": 128, "0.gate_up": 128, "0.down": 0,
    }  # fmt: skip
    assert_equal_logits(held, load(exact))


@pytest.mark.parametrize("keep", [("layers.0.mlp.down_proj",), ("k_proj",), ("layers.1.",)])
@pytest.mark.parametrize("kind", ["awq  32", "gptq act-order 32", "w4a16  32"])
def test_modules_that_are_not_converted_keep_full_numbers(tmp_path, kind, keep):
    folder, exact = saved(tmp_path, kind, keep=keep)

    held = load(folder)

    full = {name for name, form in formats(held).items() if not form.is_quantized}
    assert (
        full
        == {
            "layers.0.mlp.down_proj": {"0.down"},
            "k_proj": {"0.qkv", "1.qkv"},
            "layers.1.": {"1.qkv", "1.output", "1.gate_up", "1.down"},
        }[keep[0]]
    )
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=1e-4, atol=1e-4)


def test_scales_may_be_in_another_file_than_their_numbers(tmp_path):
    folder, exact = saved(tmp_path, "gptq act-order asymmetric 32")
    tensors = safetensors.torch.load_file(folder / FILE)
    (folder / FILE).unlink()
    files = {name: f"{1 + name.endswith(('scales', 'g_idx'))}.safetensors" for name in tensors}
    for file in sorted(set(files.values())):
        its = {name: tensor for name, tensor in tensors.items() if files[name] == file}
        safetensors.torch.save_file(its, folder / file)
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": files}))

    assert_equal_logits(load(folder), load(exact))


@pytest.mark.parametrize("version", [1, 2])
def test_a_quantized_head_is_loaded(tmp_path, version):
    CASES["llama"].save(tmp_path / "it")
    tensors = safetensors.torch.load_file(tmp_path / "it" / FILE)
    tensors["head_proj.weight"] = tensors.pop("lm_head.weight")  # a name that the writer converts
    safetensors.torch.save_file(tensors, tmp_path / "it" / FILE)
    exact = gptq_checkpoint(tmp_path / "it", sym=False, version=version, lm_head=True)
    for folder in (tmp_path / "it", exact):
        stored = safetensors.torch.load_file(folder / FILE)
        named = {name.replace("head_proj", "lm_head"): it for name, it in stored.items()}
        safetensors.torch.save_file(named, folder / FILE)

    assert_equal_logits(load(tmp_path / "it"), load(exact))


def by_name(name):
    return sum(map(ord, name))


def test_stacked_matrices_whose_orders_differ_are_held_as_full_numbers_with_a_warning(
    tmp_path, caplog
):
    CASES["llama"].save(tmp_path / "it")
    exact = gptq_checkpoint(tmp_path / "it", act_order=True, seed=by_name)

    held = load(tmp_path / "it")

    assert {name for name, form in formats(held).items() if form.ordered} == {
        f"{layer}.{name}" for layer in (0, 1) for name in ("output", "down")
    }
    assert not formats(held)["0.qkv"].is_quantized
    assert "layers.0.gate_up, layers.0.qkv, layers.1.gate_up, layers.1.qkv are held as full" in (
        caplog.text
    )
    torch.testing.assert_close(logits(held), logits(load(exact)), rtol=2e-5, atol=2e-5)


def test_an_order_that_is_that_of_the_inputs_is_not_held(tmp_path):
    folder, _ = saved(tmp_path, "gptq  32")
    change(folder, desc_act=True, static_groups=True)

    assert not any(form.ordered for form in formats(load(folder)).values())


@pytest.mark.parametrize("kind", ["awq  32", "gptq  64", "gptq asymmetric 128", "w4a16 8 bits -1"])
@pytest.mark.parametrize("size", [2, 4])
def test_ranks_hold_their_parts_packed(tmp_path, kind, size):
    folder, exact = saved(tmp_path, kind, Case("Llama", {"num_key_value_heads": 4}))

    models = assert_ranks_compute_the_same(folder, exact, size)

    assert all(form.is_quantized for model in models for form in formats(model).values())


@pytest.mark.parametrize("kind", ["gptq act-order 32", "w4a16 act-order asymmetric 32"])
def test_ranks_hold_full_numbers_where_inputs_in_an_order_are_divided(tmp_path, caplog, kind):
    folder, exact = saved(tmp_path, kind, Case("Llama", {"num_key_value_heads": 4}))

    models = assert_ranks_compute_the_same(folder, exact, 2)

    for model in models:
        full = {name for name, form in formats(model).items() if not form.is_quantized}
        assert full == {f"{layer}.{name}" for layer in (0, 1) for name in ("output", "down")}
        assert all(form.ordered for form in formats(model).values() if form.is_quantized)
    assert "would be divided among ranks" in caplog.text


def assert_ranks_compute_the_same(folder, exact, size):
    steps = [{"a": TOKENS[:9], "b": [5]}, {"a": [3], "b": [7]}]

    def drive(model):
        driver = PagedDriver(model)
        return [driver.step(chunks) for chunks in steps]

    expected = drive(load(exact))
    config = ModelConfig.from_folder(folder)
    models = []

    def compute(communicator):
        options = {"weight_format": config.weight_format, "communicator": communicator}
        model = load_part(folder, config, torch.float32, "cpu", **options)
        models.append(model)
        return drive(model)

    for found in ThreadRanks(size).run(compute):
        for step, wanted in zip(found, expected, strict=True):
            for name, whole in wanted.items():
                torch.testing.assert_close(step[name], whole, rtol=2e-4, atol=2e-4)
    return models


@pytest.mark.parametrize("form", [INT8_ROWS, INT4_GROUPS], ids=lambda it: it.name)
def test_the_c_library_gets_the_values_in_the_order_of_the_inputs(tmp_path, form):
    if isinstance(library := load_library(), str):
        pytest.skip(library)
    folder, exact = saved(tmp_path, "gptq act-order 32")

    packs = [
        PackedMatrix(library, load(it).layers[0].qkv.weight, form)._tensors
        for it in (folder, exact)
    ]

    assert all(map(torch.equal, *packs))


def test_the_single_launch_refuses_an_order_in_words(tmp_path):
    folder, _ = saved(tmp_path, "gptq act-order 32")
    problem = load(folder).executors.problem(CATALOGUE["h100"])

    assert "the inputs of some weights have another order (act-order)" in (
        single_launch.unsupported(problem)
    )


@pytest.mark.parametrize(
    "described",
    [
        {"quant_method": "gptq", "bits": 4, "group_size": 64, "desc_act": True},
        *({"actorder": name} for name in ("group", "dynamic", True)),
    ],
)
def test_a_plan_without_the_files_expects_an_order_where_groups_are_in_one(described):
    found = described if "bits" in described else packing(**described)

    assert detect({"quantization_config": found}).ordered


@pytest.mark.parametrize("kind", ["awq  64", "gptq act-order asymmetric 32", "w4a16 8 bits -1"])
def test_dummy_weights_are_in_the_format(tmp_path, kind):
    folder, _ = saved(tmp_path, kind)

    held = load(folder, load_format="dummy")

    assert all(form.is_quantized for form in formats(held).values())
    std = float(held.layers[0].down.weight.dequantize().std())
    assert std == pytest.approx(held.config.initializer_range, rel=0.05)


@pytest.mark.parametrize(
    "kind",
    [
        "gptq act-order asymmetric 32",
        *(pytest.param(it, marks=pytest.mark.slow) for it in ("awq  32", "w4a16  64")),
    ],
)
def test_a_service_continues_a_prompt_as_transformers_does(tmp_path, kind):
    found = compared(*saved(tmp_path, kind))

    assert found.tokens == 120
    assert found.difference < 1e-4
    assert found.held == kind.split()[0]


AWQ = {"quant_method": "awq", "bits": 4, "group_size": 128}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}


def packing(**changes):
    weights = {"num_bits": 4, "type": "int", "strategy": "group", "group_size": 128} | changes
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {
        "quant_method": "compressed-tensors",
        "format": "pack-quantized",
        "config_groups": groups,
    }


@pytest.mark.parametrize(
    "described",
    [
        AWQ | {"version": "GEMM", "modules_to_not_convert": ["lm_head"], "do_fuse": False},
        AWQ | {"format": "gemm", "zero_point": False, "backend": "auto"},
        GPTQ | {"damp_percent": 0.01, "true_sequential": True, "static_groups": True, "meta": {}},
        GPTQ | {"checkpoint_format": "gptq_v2", "pack_dtype": "int32", "dynamic": {}},
        GPTQ | {"bits": 8, "group_size": -1, "dynamic": None, "lm_head": True},
        packing(actorder="weight", num_bits=8),
        packing(strategy="channel", group_size=None, observer="mse"),
    ],
)
def test_what_does_not_change_the_weights_is_accepted(described):
    form = detect({"quantization_config": described})

    assert form.bits in (4, 8)
    assert not form.float
    assert not form.ordered


@pytest.mark.parametrize(
    ("described", "message"),
    [
        (AWQ | {"version": "gemv"}, r"version = 'gemv' is not supported; supported is 'gemm'"),
        (AWQ | {"version": "marlin"}, "version = 'marlin'"),
        (AWQ | {"format": "gemv_fast"}, "format = 'gemv_fast'"),
        (AWQ | {"bits": 8}, "bits = 8 is not supported; supported is 4"),
        (AWQ | {"bits": "4"}, "bits = '4'"),
        (AWQ | {"bits": None}, "bits = None"),
        (AWQ | {"bits": True}, "bits = True"),
        (AWQ | {"group_size": 0}, "group_size = 0 is not supported; supported are even numbers and -1"),
        (AWQ | {"group_size": 33}, "group_size = 33"),
        (AWQ | {"group_size": -2}, "group_size must be a whole number >= -1, found -2"),
        (AWQ | {"group_size": "128"}, "group_size must be a whole number"),
        (AWQ | {"zero_point": "yes"}, "zero_point must be true or false, found 'yes'"),
        (GPTQ | {"bits": 3}, "bits = 3 is not supported; supported is 4 or 8"),
        (GPTQ | {"bits": 2}, "bits = 2"),
        (GPTQ | {"checkpoint_format": "marlin"}, r"'marlin' is not supported; supported is 'gptq' or 'gptq_v2'"),
        (GPTQ | {"format": "bitblas"}, "format = 'bitblas'"),
        (GPTQ | {"pack_dtype": "int8"}, "pack_dtype = 'int8' is not supported"),
        (GPTQ | {"is_marlin_format": True}, "is_marlin_format = True"),
        (GPTQ | {"dynamic": {"+:.*down": {"bits": 8}}}, r"dynamic = \{'\+:\.\*down'"),
        (GPTQ | {"sym": 1}, "sym must be true or false, found 1"),
        (packing(num_bits=3), "num_bits = 3 is not supported; supported is 4 or 8"),
        (packing(type="float"), "type = 'float' is not supported; supported is 'int'"),
        (packing(strategy="block", block_structure=[64, 64]), "strategy = 'block'"),
        (packing(actorder="random"), "actorder = 'random'"),
    ],
)  # fmt: skip
def test_other_configurations_are_refused_by_name(described, message):
    with pytest.raises(ModelError, match=f"quantization_config.*{message}|{message}"):
        detect({"quantization_config": described})


def test_a_known_version_that_is_not_read_is_an_unsupported_model():
    with pytest.raises(UnsupportedModelError, match="dynamic"):
        detect({"quantization_config": GPTQ | {"dynamic": {"-:.*": {}}}})


@pytest.mark.parametrize(
    ("kind", "file", "content"),
    [
        ("gptq asymmetric 32", "quantize_config.json", {"bits": 4, "group_size": 32, "sym": False, "desc_act": False}),
        ("awq  32", "quant_config.json", {"zero_point": True, "q_group_size": 32, "w_bit": 4, "version": "GEMM"}),
    ],
)  # fmt: skip
def test_old_checkpoints_have_the_configuration_in_a_file_of_its_own(tmp_path, kind, file, content):
    folder, exact = saved(tmp_path, kind)
    config = json.loads((folder / "config.json").read_text())
    del config["quantization_config"]
    (folder / "config.json").write_text(json.dumps(config))
    (folder / file).write_text(json.dumps(content))
    (folder / FILE).rename(folder / "gptq_model-4bit-32g.safetensors")

    assert_equal_logits(load(folder), load(exact))


def test_biases_of_0_that_autogptq_adds_are_ignored_and_others_are_not(tmp_path):
    folder, exact = saved(tmp_path, "gptq  32")
    change_tensors(folder, lambda it: it.update({f"{QUERY}.bias": torch.zeros(64).half()}))

    assert_equal_logits(load(folder), load(exact))
    change_tensors(folder, lambda it: it[f"{QUERY}.bias"].fill_(0.5))
    with pytest.raises(WeightsError, match=rf"1 unexpected: {QUERY}\.bias"):
        load(folder)


def test_a_zero_point_of_0_that_borrowed_from_its_neighbour_is_read(tmp_path):
    CASES["llama"].save(tmp_path / "it")
    tensors = safetensors.torch.load_file(tmp_path / "it" / FILE)
    tensors[f"{QUERY}.weight"][::2] += 1.0  # no negative weights in every other row
    tensors[f"{QUERY}.weight"] = tensors[f"{QUERY}.weight"].contiguous()
    safetensors.torch.save_file(tensors, tmp_path / "it" / FILE)
    exact = gptq_checkpoint(tmp_path / "it", sym=False)

    held = load(tmp_path / "it")

    values = held.layers[0].qkv.weight.dequantize()[:64]
    assert torch.equal(values, safetensors.torch.load_file(exact / FILE)[f"{QUERY}.weight"])


@pytest.mark.parametrize("words", [0x77777777, -0x77777778])
def test_zero_points_of_a_symmetric_checkpoint_may_be_those_of_either_version(tmp_path, words):
    folder, exact = saved(tmp_path, "gptq  32")
    change_tensors(folder, lambda it: [x.fill_(words) for n, x in it.items() if "qzeros" in n])

    assert_equal_logits(load(folder), load(exact))


def pop(name):
    return lambda tensors: tensors.pop(f"{QUERY}.{name}")


def put(name, tensor):
    return lambda tensors: tensors.update({f"{QUERY}.{name}": tensor})


@pytest.mark.parametrize(
    ("kind", "edit", "message"),
    [
        ("awq  32", pop("scales"), f"{QUERY}.qweight is int32 with 64 rows; {QUERY}.scales, which belongs to it, is m"),
        ("awq  32", pop("qzeros"), "for which there must be zero points"),
        ("awq  32", put("scales", torch.ones(3, 64).half()), r"its scale must be \[2, 64\], floats; .* is \[3, 64\]"),
        ("awq  32", put("qzeros", torch.ones(2, 9).int()), r"its zero must be \[2, 8\], I32"),
        ("awq symmetric 32", put("qzeros", torch.ones(2, 8).int()), "other than 8, although zero_point is false"),
        ("gptq  32", put("qzeros", torch.ones(2, 8).int()), "qweight has zero points other than 8, although sym is tr"),
        ("gptq  32", put("scales", torch.ones(2, 64).int()), "its scale must be"),
        ("gptq  32", put("g_idx", torch.ones(63).int()), r"its order must be \[64\], I32 or I64"),
        ("gptq  32", put("g_idx", torch.ones(64).int()), "inputs are in groups that have not 32 inputs each"),
        ("gptq  32", put("g_idx", torch.arange(64)), "inputs are in groups that have not 32 inputs each"),
        ("gptq  32", put("qweight", torch.ones(9, 64).int()), r"1 wrongly shaped|its scale must be"),
        ("gptq  32", put("qweight", torch.ones(8, 64)), f"{QUERY}.(scales|qzeros|g_idx) belongs to no int32"),
        ("gptq  32", pop("qweight"), f"{QUERY}.(scales|qzeros|g_idx) belongs to no int32 tensor"),
        ("w4a16  32", pop("weight_shape"), "weight_shape, which belongs to it, is missing"),
        ("w4a16  32", put("weight_shape", torch.tensor([64, 65])), r"must be \[64, up to 64\], not \[64, 65\]"),
        ("w4a16  32", put("weight_shape", torch.tensor([32, 64])), r"not \[32, 64\]"),
        ("w4a16  32", put("weight_shape", torch.tensor([64.0, 64.0])), r"not \[\]"),
        ("w4a16  32", put("weight_shape", torch.tensor([64, 63])), "63 inputs, which must be an even number"),
        ("w4a16  32", put("weight_zero_point", torch.ones(8, 2).int()), "other than 0, although symmetric is true"),
        ("w4a16 asymmetric 32", pop("weight_zero_point"), "there must be zero points"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_each_other_are_named(tmp_path, kind, edit, message):
    folder, _ = saved(tmp_path, kind)
    change_tensors(folder, edit)

    with pytest.raises(WeightsError, match=message):
        load(folder)


def test_a_matrix_with_one_scale_and_zero_points_that_are_not_packed_is_read(tmp_path):
    folder, _ = saved(tmp_path, "w4a16 asymmetric -1")
    scale, zero = torch.tensor([0.125]), torch.tensor([3], dtype=torch.int8)
    numbers = torch.randint(0, 16, (64, 64), generator=torch.Generator().manual_seed(0))

    def edit(tensors):
        put("weight_packed", packed(numbers, 4, 1))(tensors)
        put("weight_scale", scale)(tensors)
        put("weight_zero_point", zero)(tensors)

    change_tensors(folder, edit)

    found = load(folder).layers[0].qkv.weight.dequantize()[:64]
    assert torch.equal(found, (numbers - 8.0 - 3.0) * 0.125)


def test_a_model_without_a_format_is_not_changed(tmp_path):
    CASES["llama"].save(tmp_path / "it")

    assert set(formats(load(tmp_path / "it")).values()) == {unquantized("float32")}


@pytest.mark.parametrize(
    ("kind", "packing_format", "method"),
    [
        ("gptq asymmetric 32", "auto_round:auto_gptq", "auto-round"),
        ("awq  32", "auto_round:auto_awq", "intel/auto-round"),
    ],
)
def test_the_packings_of_autoround_that_are_those_of_others_are_read(
    tmp_path, kind, packing_format, method
):
    folder, exact = saved(tmp_path, kind)
    change(folder, quant_method=method, packing_format=packing_format, sym=False, data_type="int")

    assert_equal_logits(load(folder), load(exact))
    change(folder, packing_format="auto_round")
    with pytest.raises(UnsupportedModelError, match="`auto_round:auto_gptq` and `auto_round:auto_"):
        load(folder)


def test_ranks_that_would_divide_a_byte_are_refused_in_words(tmp_path):
    case = Case("Llama", {"intermediate_size": 36, "num_key_value_heads": 4})
    folder, _ = saved(tmp_path, "w4a16  -1", case)
    config = ModelConfig.from_folder(folder)

    def compute(communicator):
        options = {"weight_format": config.weight_format, "communicator": communicator}
        load_part(folder, config, torch.float32, "cpu", **options)

    with pytest.raises(WeightsError, match=r"divides a byte of w4a16; set --tensor-parallel to an"):
        ThreadRanks(4).run(compute)

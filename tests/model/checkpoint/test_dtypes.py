import dataclasses

import pytest
import torch

from kernels.arch import CATALOGUE, CPU
from kernels.torch_private import onednn_has_bfloat16
from kernels.weight_format import FP8_ROWS, INT8_GROUPS, LIBRARY_FORMATS, WeightFormat
from model.checkpoint.dtypes import resolve_dtype, resolve_quantization
from model.device.quantizations import is_for_library, loaded_format, quantization_name
from model.errors import ModelError
from tests.model.configs import model_config


def config_of(num_layers, dtype):
    return model_config(
        architecture="LlamaForCausalLM",
        vocab_size=32000,
        hidden_size=1024,
        intermediate_size=2816,
        num_layers=num_layers,
        num_heads=16,
        num_kv_heads=4,
        head_dim=64,
        max_position_embeddings=2048,
        dtype=dtype,
    )


@pytest.mark.parametrize(
    ("num_layers", "dtype", "has_instructions", "chosen"),
    [
        (24, "bfloat16", True, torch.bfloat16),
        (24, "bfloat16", False, torch.float32),
        (24, "float16", True, torch.float32),
        (24, "float32", True, torch.float32),
        (2, "bfloat16", True, torch.float32),
    ],
)
def test_a_cpu_uses_bfloat16_only_for_large_bfloat16_checkpoints(
    monkeypatch, num_layers, dtype, has_instructions, chosen
):
    monkeypatch.setattr(
        "model.checkpoint.dtypes.has_bfloat16_instructions", lambda: has_instructions
    )
    monkeypatch.setattr("model.checkpoint.dtypes.arm_has_bfloat16", lambda: False)

    assert resolve_dtype("auto", config_of(num_layers, dtype), "cpu") is chosen


def test_an_arm_processor_with_bfloat16_uses_it_like_an_x86(monkeypatch):
    monkeypatch.setattr("model.checkpoint.dtypes.has_bfloat16_instructions", lambda: False)
    monkeypatch.setattr("model.checkpoint.dtypes.arm_has_bfloat16", lambda: True)

    assert resolve_dtype("auto", config_of(24, "bfloat16"), "cpu") is torch.bfloat16
    assert resolve_dtype("auto", config_of(2, "bfloat16"), "cpu") is torch.float32


def test_without_onednn_there_are_no_bfloat16_products(monkeypatch):
    monkeypatch.setattr(torch.backends.mkldnn, "is_available", lambda: False)

    assert not onednn_has_bfloat16()


@pytest.mark.parametrize(
    ("dtype", "has_bfloat16", "chosen"),
    [
        ("bfloat16", True, torch.bfloat16),
        ("float32", True, torch.bfloat16),
        ("float16", True, torch.float16),
        ("bfloat16", False, torch.float16),
    ],
)
def test_a_gpu_uses_half_precision(monkeypatch, dtype, has_bfloat16, chosen):
    arch = CATALOGUE["a100" if has_bfloat16 else "t4"]
    monkeypatch.setattr("model.checkpoint.dtypes.detect", lambda device: arch)

    assert resolve_dtype("auto", config_of(2, dtype), "cuda") is chosen


def test_bfloat16_on_a_gpu_that_emulates_it_is_used_with_a_warning(monkeypatch, caplog):
    monkeypatch.setattr("model.checkpoint.dtypes.detect", lambda device: CATALOGUE["t4"])

    assert resolve_dtype("bfloat16", config_of(2, "bfloat16"), "cuda") is torch.bfloat16
    assert "float16 is faster" in caplog.text


def test_an_explicit_dtype_is_used_unchanged():
    assert resolve_dtype("float16", config_of(2, "bfloat16"), "cpu") is torch.float16


def test_an_unknown_dtype_is_rejected():
    with pytest.raises(ModelError, match="'int8' is none of auto, float32"):
        resolve_dtype("int8", config_of(2, "bfloat16"), "cpu")


def supported():
    return ()


def unsupported():
    return ("its heads are too large", "there is no library")


def never():
    raise AssertionError("this must not be asked")


@pytest.mark.parametrize(
    ("arch", "dtype", "reasons", "resolved"),
    [
        (CPU, "auto", supported, INT8_GROUPS),
        (CPU, "auto", unsupported, None),
        (CPU, "float32", supported, None),
        (CPU, "bfloat16", supported, None),
        (CATALOGUE["h100"], "auto", never, None),
        (CATALOGUE["t4"], "auto", never, None),
    ],
)
def test_auto_is_int8_only_on_a_cpu_that_supports_it_and_without_a_requested_dtype(
    arch, dtype, reasons, resolved
):
    assert resolve_quantization("auto", arch, dtype, reasons) == resolved


@pytest.mark.parametrize("quantization", ["int8", "int4"])
def test_integer_weights_on_a_cpu_that_supports_them_are_used(quantization):
    form = resolve_quantization(quantization, CPU, "auto", supported)
    assert form in LIBRARY_FORMATS
    assert quantization_name(form) == quantization
    assert loaded_format(form, None, in_library=True) is None
    assert loaded_format(form, None) == form


STORED = WeightFormat("Q4_1", 4, 32, "group", shifts=True, float=False, scale_dtype="float16")
FP8_STORED = WeightFormat("fp8-blocks", 8, group=128, scales="block")


@pytest.mark.parametrize("requested", ["auto", "none"])
@pytest.mark.parametrize(
    ("stored", "arch", "dtype", "reasons", "in_library"),
    [
        (STORED, CPU, "auto", supported, True),
        (STORED, CPU, "auto", unsupported, False),
        (STORED, CPU, "float32", supported, False),
        (STORED, CATALOGUE["h100"], "auto", supported, False),
        (FP8_STORED, CPU, "auto", supported, False),
        (dataclasses.replace(STORED, group=24), CPU, "auto", supported, False),
    ],
)
def test_the_library_computes_with_the_integers_of_a_checkpoint_where_it_can(
    requested, stored, arch, dtype, reasons, in_library
):
    form = resolve_quantization(requested, arch, dtype, reasons, stored)

    assert form == stored
    assert quantization_name(form) == stored.name
    assert is_for_library(form, arch, dtype, reasons) is in_library


@pytest.mark.parametrize("requested", ["int8", "int4"])
def test_a_setting_of_the_library_loads_the_format_of_the_checkpoint(requested):
    form = resolve_quantization(requested, CPU, "auto", supported, STORED)

    assert quantization_name(form) == requested
    assert is_for_library(form, CPU, "auto", supported)
    assert loaded_format(form, STORED, in_library=True) == STORED


@pytest.mark.parametrize("requested", ["int8", "int4"])
def test_a_network_whose_steps_the_library_does_not_compute_is_rounded_when_it_is_loaded(requested):
    form = resolve_quantization(requested, CPU, "auto", supported)

    assert not is_for_library(form, CPU, "auto", unsupported)
    assert loaded_format(form, None) == form


@pytest.mark.parametrize("arch", [CPU, CATALOGUE["h100"]])
def test_weights_that_are_not_to_be_quantized_are_not(arch):
    assert resolve_quantization("none", arch, "float32", never) is None
    assert quantization_name(None) == "none"


@pytest.mark.parametrize("arch", ["a100", "l4", "h100"])
def test_gpus_with_triton_kernels_support_float8_weights(arch):
    form = resolve_quantization("fp8", CATALOGUE[arch], "bfloat16", never)
    assert form == loaded_format(form, None) == FP8_ROWS
    assert quantization_name(form) == "fp8"


@pytest.mark.parametrize(
    ("requested", "arch", "dtype", "words"),
    [
        ("int2", CPU, "auto", "'int2' is none of auto, none, fp8, int8, int4$"),
        ("fp8", CPU, "auto", "has none: needs a GPU; set quantization to int8, int4, auto or none"),
        ("fp8", CATALOGUE["t4"], "float16", "needs sm_80, .* this is sm_75.*; .* to none$"),
        ("int8", CATALOGUE["h100"], "auto", "quantization int8: .* H100 .* a GPU; .* fp8, none or"),
        ("int4", CPU, "auto", "its heads are too large; there is no library; set .* none or auto"),
        ("int8", CPU, "float32", "int8 is .* set dtype to auto, not float32; its heads are too"),
    ],
)
def test_unsupported_quantization_is_rejected_with_every_reason(requested, arch, dtype, words):
    with pytest.raises(ModelError, match=words):
        resolve_quantization(requested, arch, dtype, unsupported)

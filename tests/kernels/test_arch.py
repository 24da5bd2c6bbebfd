"""The catalogue of processors, their capabilities, and detection."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace

import pytest
import torch

from kernels import arch
from kernels.arch import (
    ADA,
    AMPERE,
    BLACKWELL,
    CATALOGUE,
    FP8_INSTRUCTIONS,
    HOPPER,
    PROCESSORS,
    TENSOR_CORES,
    TURING,
    detect,
)
from kernels.errors import UnsupportedDeviceError


def test_the_catalogue_holds_the_documented_processors():
    assert set(CATALOGUE) == {
        "cpu", "t4", "a100", "a10", "l4", "rtx4090", "h100", "h200", "b200", "rtx5090",
    }  # fmt: skip
    assert all(key == entry.key for key, entry in CATALOGUE.items())


@pytest.mark.parametrize(
    ("key", "sm"),
    [("cpu", 0), ("t4", 75), ("a100", 80), ("a10", 86), ("l4", 89), ("rtx4090", 89), ("h100", 90),
     ("h200", 90), ("b200", 100), ("rtx5090", 120)],
)  # fmt: skip
def test_compute_capabilities_match_the_vendors_data(key, sm):
    assert CATALOGUE[key].sm == sm


def test_only_the_cpu_has_no_compute_capability():
    assert [entry.key for entry in CATALOGUE.values() if entry.is_cpu] == ["cpu"]


def test_the_host_is_detected_as_a_cpu_with_its_cores():
    found = detect("cpu")

    assert found.is_cpu
    assert found.key == "cpu"
    assert found.num_sms >= 1


@pytest.fixture
def driver(monkeypatch):
    """Make the driver report one GPU."""

    def report(name, num_sms):
        facts = SimpleNamespace(
            name=name,
            major=8,
            minor=6,
            multi_processor_count=num_sms,
            shared_memory_per_block_optin=101376,
            total_memory=24 * 2**30,
        )
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
        arch._detect_gpu.cache_clear()

    yield report
    arch._detect_gpu.cache_clear()


@pytest.mark.parametrize(
    ("name", "key"),
    [
        ("Tesla T4", "t4"),
        ("NVIDIA A100-SXM4-80GB", "a100"),
        ("NVIDIA A10", "a10"),
        ("NVIDIA L4", "l4"),
        ("NVIDIA GeForce RTX 4090", "rtx4090"),
        ("NVIDIA H100 80GB HBM3", "h100"),
        ("NVIDIA H200", "h200"),
        ("NVIDIA B200", "b200"),
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
        *((arch.name, arch.key) for arch in PROCESSORS.values() if not arch.is_cpu),
    ],
)
def test_a_driver_name_is_matched_to_a_known_processor(driver, name, key):
    known = PROCESSORS[key]
    driver(name, known.num_sms)

    found = detect("cuda:0")

    assert found.key == key
    assert found.memory_bandwidth_gbs == known.memory_bandwidth_gbs
    assert found.half_tflops == known.half_tflops
    assert found.float32_tflops == known.float32_tflops
    assert (found.sm, found.num_sms, found.shared_memory_bytes) == (86, known.num_sms, 101376)
    assert found.memory_mib == 24 * 2**10


@pytest.mark.parametrize(
    ("name", "num_sms"),
    [
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 76),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", 128),
        ("NVIDIA GeForce RTX 4090 D", 114),
        ("NVIDIA GeForce RTX 5090 D", 170),
        ("NVIDIA A10M", 64),
        ("NVIDIA A100-PCIE-40GB", 108),
        ("NVIDIA A100-SXM4-80GB MIG 3g.40gb", 42),
        ("NVIDIA H100 NVL MIG 1g.12gb", 16),
        ("NVIDIA L40S", 71),
    ],
)
def test_a_variant_of_a_known_gpu_keeps_its_name_and_has_no_known_peaks(driver, name, num_sms):
    driver(name, num_sms)

    found = detect("cuda:0")

    assert found.key == name.lower().replace(" ", "-")
    assert (found.memory_bandwidth_gbs, found.half_tflops, found.float32_tflops) == (0, 0.0, 0.0)
    assert found.num_sms == num_sms


def test_float32_has_its_own_peak():
    h100 = CATALOGUE["h100"]

    assert h100.peak_tflops("bfloat16") == h100.peak_tflops("float16") == h100.half_tflops
    assert h100.peak_tflops("float32") == h100.float32_tflops


def test_every_known_gpu_has_the_peaks_of_its_roofline():
    for entry in CATALOGUE.values():
        figures = (entry.memory_bandwidth_gbs, entry.half_tflops, entry.float32_tflops)
        assert all(figures) != entry.is_cpu, entry.key


def test_only_turing_has_no_bfloat16():
    assert [entry.key for entry in CATALOGUE.values() if not entry.has_bfloat16] == ["t4"]


def gpu(sm):
    return dataclasses.replace(CATALOGUE["h100"], sm=sm)


@pytest.mark.parametrize(
    ("capability", "expected"),
    [
        ("has_triton", TURING | TENSOR_CORES),
        ("has_triton_tensor_cores", AMPERE | ADA | HOPPER | BLACKWELL),
        ("has_fp8_conversion", FP8_INSTRUCTIONS),
        ("has_dependent_launch", HOPPER | BLACKWELL),
        ("is_tested", {0, 90}),
    ],
)
def test_a_capability_holds_only_for_its_compute_capabilities(capability, expected):
    assert {sm for sm in range(130) if getattr(gpu(sm), capability)} == expected


def test_unsupported_names_the_needed_and_the_given_compute_capability():
    assert gpu(90).unsupported(HOPPER) == ()
    assert gpu(80).unsupported(HOPPER, "no wgmma") == ("needs sm_90, this is sm_80 (no wgmma)",)
    assert gpu(75).unsupported(AMPERE) == ("needs sm_80, sm_86 or sm_87, this is sm_75",)
    assert CATALOGUE["cpu"].unsupported(AMPERE, "no wgmma") == ("needs a GPU",)


def test_unsupported_names_the_assembler_for_a_gpu_that_it_does_not_know():
    (reason,) = gpu(110).unsupported(HOPPER, "no wgmma")

    assert reason == (
        "needs sm_90, this is sm_110, which the ptxas 12.9 bundled with Triton 3.6.0 cannot assemble"
    )


def test_an_amd_gpu_is_rejected_by_name(driver, monkeypatch):
    driver("AMD Instinct MI300X", 304)
    monkeypatch.setattr(torch.version, "hip", "6.4")

    with pytest.raises(UnsupportedDeviceError, match="MI300X is an AMD GPU"):
        detect("cuda:0")

    assert detect("cpu").is_cpu

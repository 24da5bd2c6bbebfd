"""Names of GPUs as people, drivers and shops write them."""

import pytest

from kernels.arch import CATALOGUE, PROCESSORS, known_processors
from kernels.processor_names import ALIASES, CAPABILITIES, UnknownProcessorError, read


@pytest.mark.parametrize("arch", PROCESSORS.values(), ids=lambda arch: arch.key)
def test_a_processor_is_found_by_its_key_and_by_its_drivers_name_in_any_case(arch):
    for name in (arch.key, arch.key.upper(), arch.name, arch.name.lower(), arch.name.upper()):
        assert read(name) == arch.key


@pytest.mark.parametrize(
    ("key", "names"),
    {
        "rtx4090": ["4090", "rtx-4090", "RTX 4090", "rtx_4090", "GeForce RTX 4090", "4090 24GB"],
        "rtx3090ti": ["3090 ti", "RTX 3090Ti"],
        "rtxa6000": ["a6000", "RTX A6000"],
        "rtx6000ada": ["6000 ada", "RTX 6000 Ada"],
        "l40s": ["L40S-48GB", "l40s"],
        "a10g": ["A10G", "nvidia a10g"],
        "a100": ["NVIDIA A100-SXM4-80GB", "a100 80gb", "A100-SXM"],
        "a100-40gb": ["NVIDIA A100-PCIE-40GB", "a100 40gb"],
        "a100-pcie": ["NVIDIA A100 80GB PCIe"],
        "h100": ["NVIDIA H100 80GB HBM3", "H100_80GB", "h100-sxm5-80gb"],
        "h200": ["h200-141gb", "H200 SXM"],
        "t4": ["Tesla T4"],
        "b300": ["NVIDIA B300 SXM6 AC"],
        "sm_90": ["sm90", "SM_90", "sm_90a", "9.0", "compute_90", "hopper", "Hopper"],
        "sm_89": ["ada", "Lovelace", "8.9"],
        "sm_100": ["blackwell", "sm_100f", "10.0"],
    }.items(),
)
def test_other_names_of_a_processor_or_a_capability_are_read(key, names):
    assert [read(name) for name in names] == [key] * len(names)


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("v100", "v100 is older than sm_75"),
        ("Tesla V100-SXM2-16GB", "older than sm_75"),
        ("sm_70", "older than sm_75"),
        ("GTX 1080 Ti", "older than sm_75"),
        ("mi300", "mi300 is an AMD GPU"),
        ("AMD Instinct MI300X", "is an AMD GPU"),
        ("m3 max", "is no NVIDIA GPU"),
        ("gb10", "no known peaks"),
        ("m4", "no NVIDIA GPU"),
        ("gtx 1660", "is none of"),
        ("h1000", r"'h1000' is none of cpu, t4, .*, sm_75, .*, sm_120$"),
        ("h100 24gb", "is none of"),
        ("NVIDIA GeForce RTX 4090 Laptop GPU", "is none of"),
        ("", "is none of"),
    ],
)
def test_a_name_of_no_supported_processor_is_refused_with_the_reason(name, why):
    with pytest.raises(UnknownProcessorError, match=why):
        read(name)


def test_only_allowed_processors_are_read():
    with pytest.raises(UnknownProcessorError, match="'cpu' is none of h100, sm_75"):
        read("cpu", ["h100"])
    assert read("hopper", ["h100"]) == "sm_90"


def test_every_alias_names_a_processor_or_a_capability():
    assert set(ALIASES) <= {*PROCESSORS, *CAPABILITIES}


def test_a_capability_is_that_of_the_catalogues_processors_where_it_has_some():
    assert [it.key for it in known_processors("sm_90")] == ["h100", "h200"]
    assert [it.key for it in known_processors("sm_103")] == ["b300"]


def test_every_known_gpu_has_facts_like_those_of_the_catalogue():
    for arch in PROCESSORS.values():
        if not arch.is_cpu:
            assert arch.sm in {it.sm for it in CATALOGUE.values()} | {103}
            assert 0 < arch.float32_tflops <= arch.half_tflops
            assert arch.fp8_tflops == 0 or 1.9 < arch.fp8_tflops / arch.half_tflops < 2.1
            assert arch.memory_mib > 10_000
            assert 300 <= arch.memory_bandwidth_gbs <= 8000

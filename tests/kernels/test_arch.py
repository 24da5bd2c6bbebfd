"""Facts about processors."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from kernels import arch
from kernels.arch import CATALOGUE, detect


def test_the_catalogue_holds_the_processors_that_plans_are_shown_for():
    assert set(CATALOGUE) == {
        "cpu", "t4", "a100", "a10", "l4", "rtx4090", "h100", "h200", "b200", "rtx5090",
    }  # fmt: skip
    assert all(key == entry.key for key, entry in CATALOGUE.items())


@pytest.mark.parametrize(
    ("key", "sm"),
    [("cpu", 0), ("t4", 75), ("a100", 80), ("a10", 86), ("l4", 89), ("rtx4090", 89), ("h100", 90),
     ("h200", 90), ("b200", 100), ("rtx5090", 120)],
)  # fmt: skip
def test_compute_capabilities_are_those_of_the_vendor(key, sm):
    assert CATALOGUE[key].sm == sm


def test_only_the_cpu_has_no_compute_capability():
    assert [entry.key for entry in CATALOGUE.values() if entry.is_cpu] == ["cpu"]


def test_the_host_is_detected_as_a_cpu_with_its_cores():
    found = detect("cpu")

    assert found.is_cpu
    assert found.key == "cpu"
    assert found.num_sms >= 1


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
        ("NVIDIA GeForce RTX 5090", "rtx5090"),
    ],
)
def test_a_driver_name_is_matched_to_the_catalogue(monkeypatch, name, key):
    facts = SimpleNamespace(
        name=name, major=8, minor=6, multi_processor_count=72, shared_memory_per_block_optin=101376
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    arch._detect_gpu.cache_clear()

    found = detect("cuda:0")

    arch._detect_gpu.cache_clear()
    assert found.key == key
    assert found.memory_bandwidth_gbs == CATALOGUE[key].memory_bandwidth_gbs
    assert (found.sm, found.num_sms, found.shared_memory_bytes) == (86, 72, 101376)


@pytest.mark.parametrize("name", ["NVIDIA GeForce RTX 4090 Laptop GPU", "NVIDIA A30"])
def test_an_unknown_gpu_keeps_its_own_name_and_no_bandwidth(monkeypatch, name):
    facts = SimpleNamespace(
        name=name, major=8, minor=9, multi_processor_count=76, shared_memory_per_block_optin=101376
    )
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda index: facts)
    arch._detect_gpu.cache_clear()

    found = detect("cuda:0")

    arch._detect_gpu.cache_clear()
    assert found.key == name.lower().replace(" ", "-")
    assert found.memory_bandwidth_gbs == 0

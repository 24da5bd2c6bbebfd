"""bfloat16 on Arm processors, of which the tests have none."""

import platform
import sys

import pytest

from model.checkpoint import cpu_dtype
from model.checkpoint.cpu_dtype import arm_has_bfloat16


@pytest.mark.parametrize(("value", "found"), [(1, True), (0, False), (None, False)])
def test_on_macos_the_kernel_says_whether_there_is_bfloat16(monkeypatch, value, found):
    monkeypatch.setattr(sys, "platform", "darwin")
    monkeypatch.setattr(platform, "machine", lambda: "arm64")
    monkeypatch.setattr(cpu_dtype, "read_sysctl", {"hw.optional.arm.FEAT_BF16": value}.get)

    assert arm_has_bfloat16() is found


@pytest.mark.parametrize(
    ("features", "found"),
    [
        (["fp asimd i8mm bf16"], True),
        (["fp asimd asimdhp"], False),
        (["fp bf16", "fp"], False),  # on some of the cores only
        (["fp svebf16"], False),
        ([], False),
    ],
)
def test_on_linux_all_processors_must_list_bfloat16(monkeypatch, tmp_path, features, found):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("".join(f"processor : 0\nFeatures\t: {line}\n" for line in features))

    assert arm_has_bfloat16(cpuinfo) is found


def test_a_processor_that_cannot_be_described_has_none(monkeypatch, tmp_path):
    monkeypatch.setattr(sys, "platform", "linux")
    monkeypatch.setattr(platform, "machine", lambda: "aarch64")

    assert not arm_has_bfloat16(tmp_path / "absent")


def test_an_x86_is_no_arm_processor(monkeypatch):
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")

    assert not arm_has_bfloat16()

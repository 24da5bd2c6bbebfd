"""The choice of a build of the C library, and that all builds that run here agree."""

import json
import os
import platform
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from deploy.build_hook import builds
from kernels.cpu import library
from kernels.cpu.library import BUILDS, choose
from kernels.recurrent import cpu_library as recurrent
from kernels.recurrent.problem import NORM_EPS
from tests.kernels.cpu import evex
from tests.kernels.cpu.hooks import pytest_report_header, runnable_builds

AVX2 = {"avx2", "fma3", "f16c"}
AVX512 = {"avx512_f", "avx512_bw", "avx512_dq", "avx512_vl", "avx512_cd"}


@pytest.mark.parametrize(
    ("machine", "features", "capability", "name"),
    [
        ("x86_64", AVX2, "AVX2", "avx2"),
        ("AMD64", AVX2 | AVX512 | {"avx512_vnni"}, "AVX512", "avx512_vnni"),
        ("x86_64", AVX2 | AVX512 | {"avx512_vnni"}, "AVX2", "avx2"),
        ("x86_64", AVX2 | AVX512 | {"avx512_vnni"}, "DEFAULT", None),
        ("x86_64", AVX2 | AVX512, "AVX512", "avx2"),
        ("x86_64", AVX2 | {"avx_vnni"}, "AVX2", "avx_vnni"),
        ("x86_64", {"sse4_2"}, "DEFAULT", None),
        ("aarch64", {"neon_dotprod"}, "DEFAULT", "neon"),
        ("arm64", {"neon_dotprod"}, "NO AVX", "neon"),
        ("arm64", set(), "DEFAULT", None),
        ("riscv64", AVX2, "DEFAULT", None),
    ],
)
def test_a_processor_gets_the_first_build_whose_instructions_it_has(
    machine, features, capability, name
):
    build = choose(machine, frozenset(features), capability)

    assert (build and build.name) == name


def test_limits_of_recurrent_mixers_are_those_of_the_c_sources():
    folder = Path(library.__file__).with_name("native")
    text = "".join((folder / name).read_text() for name in ("vectors.h", "recurrent.h"))
    stated = {
        name: int(value) for name, value in re.findall(r"^#define (\w+) +(\d+)\b", text, re.M)
    }

    assert stated["LANES"] == recurrent._LANES
    assert stated["MOST_WIDTH"] == recurrent._MOST_WIDTH
    assert stated["MOST_STATE"] == recurrent._MOST_STATE
    (eps,) = re.findall(r"sqrtf\(sum\(squares\) \+ (\S+)f\)", text)
    assert float(eps) == NORM_EPS


@pytest.mark.parametrize(
    ("platform", "names"),
    [
        ("manylinux_2_28_x86_64", {"avx512_vnni.so", "avx_vnni.so", "avx2.so"}),
        ("manylinux_2_28_aarch64", {"neon.so"}),
        ("macosx_11_0_arm64", {"neon.dylib"}),
        ("macosx_11_0_x86_64", {"avx2.dylib"}),
        ("any", set()),
    ],
)
def test_an_installation_compiles_the_builds_of_its_platform(platform, names):
    found = builds(platform)

    assert {name for name, _, _ in found} == names
    assert {name.split(".")[0] for name in names} <= {build.name for build in BUILDS}


def test_a_missing_file_is_a_reason_and_no_error(monkeypatch, tmp_path):
    monkeypatch.setattr(library, "_FOLDER", tmp_path)

    assert "install the package again" in library.load.__wrapped__()


def test_a_library_of_another_version_is_not_loaded(monkeypatch):
    if isinstance(library.load(), str):
        pytest.skip(library.load())
    monkeypatch.setattr(library, "VERSION", library.VERSION + 1)

    assert "install the package again" in library.load.__wrapped__()


SCRIPT = """
import json, pathlib, sys, torch
from kernels.cpu import library
library._FOLDER = pathlib.Path(sys.argv[2])
library.choose = lambda *_: next(b for b in library.BUILDS if b.name == sys.argv[1])
from kernels.cpu.decoder import DecoderShape
from tests.kernels.cpu.bound import Driver, bind
from tests.kernels.cpu.reference import Decoder
shape = DecoderShape(192, 320, 6, 2, 64, 1e-6, 0.125, (0, 40))
for bits in (8, 4):
    logits = Driver(bind(Decoder(shape, 99, bits)), shape).run([i % 99 for i in range(90)], [60, 1, 28, 1])
    print(json.dumps(logits.tolist()))
"""


def test_all_builds_that_run_here_give_the_same_logits():
    runnable = runnable_builds()
    if not runnable:
        pytest.skip("no build for this processor")
    root = Path(__file__).parents[3]
    logits = []
    for name in runnable:
        run = subprocess.run(
            [sys.executable, "-c", SCRIPT, name, str(library._FOLDER)],
            capture_output=True,
            text=True,
            check=True,
            cwd=root,
            env=os.environ | {"PYTHONPATH": str(root)},
        )
        logits.append([torch.tensor(json.loads(line)) for line in run.stdout.splitlines()])
    for other in logits[1:]:
        for a, b in zip(other, logits[0], strict=True):
            assert (a - b).abs().max() < 0.1 * b.std(), runnable
            assert (a - b).abs().mean() < 6e-3 * b.std(), runnable


@pytest.mark.parametrize(
    ("capability", "encoding", "said"),
    [
        ("AVX512", None, "avx512_vnni, compared with avx2 by one test"),
        ("AVX2", None, "avx2, compared with avx512_vnni by one test"),
        ("AVX2", "EVEX", "avx2 with EVEX encodings, compared with avx512_vnni by one test"),
    ],
)
def test_a_run_says_which_builds_it_tests_and_which_it_cannot(
    capability, encoding, said, monkeypatch
):
    monkeypatch.setattr(evex, "encoding", lambda: encoding)
    monkeypatch.setattr(library, "load", lambda: None)
    monkeypatch.setattr(library, "cpu_features", lambda: frozenset(AVX2 | AVX512 | {"avx512_vnni"}))
    monkeypatch.setattr(platform, "machine", lambda: "x86_64")
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: capability)

    assert pytest_report_header() == (
        f"C library: tests run {said}; this processor cannot run avx_vnni, neon"
    )
    monkeypatch.setattr(library, "load", lambda: "there is no compiler")
    assert pytest_report_header() == "C library: none, because there is no compiler"

"""What `tessera doctor` says about machines that are described by facts."""

import dataclasses
import json
from dataclasses import replace

import pytest

from server.cli.doctor.checks import Check, Status, check
from server.cli.doctor.command import as_json, has_error, render
from server.cli.doctor.facts import Software
from server.cli.nvidia import Driver
from server.cli.settings import Settings
from tests.cli.doctor.machines import GIB, H100, MACHINE, WITHOUT_GPU, diagnose


def changed(folder, **changes):
    return {folder: dataclasses.replace(getattr(MACHINE, folder), **changes)}


@pytest.mark.parametrize(
    ("machine", "device"),
    [(MACHINE, "auto"), (MACHINE, "cuda"), (MACHINE, "cpu"), (WITHOUT_GPU, "auto")],
)
def test_a_good_machine_has_no_findings(machine, device):
    assert diagnose(machine, device=device) == {}


def test_an_old_driver_is_one_line_that_says_which_one_is_needed():
    old = replace(MACHINE, driver=Driver(True, (12, 4), "550.54.15"), gpus=())

    assert diagnose(old) == {
        "driver": (
            "error",
            "driver 550.54.15 supports CUDA 12.4, PyTorch 2.11.0 is built for CUDA 13.0: install driver 580 or newer, "
            "or PyTorch for CUDA 12 (docs/operations.md)",
        )
    }


def test_a_driver_of_the_same_major_version_is_new_enough():
    software = replace(MACHINE.software, cuda=(12, 8))

    assert diagnose(replace(MACHINE, software=software, driver=Driver(True, (12, 4)))) == {}


@pytest.mark.parametrize(
    ("device", "status"), [("auto", "warning"), ("cuda", "error")], ids=["auto", "cuda"]
)
@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"driver": Driver(has_device=True)}, "libcuda.so.1"),
        ({"software": Software("3.12.1", "2.11.0+cpu", triton="3.6.0")}, "is built for CPUs"),
    ],
    ids=["no library", "no CUDA"],
)
def test_a_gpu_that_cannot_be_used_is_an_error_if_it_was_asked_for(changes, words, device, status):
    found = diagnose(replace(MACHINE, gpus=(), **changes), device=device)

    assert found["driver"][0] == status
    assert words in found["driver"][1]


@pytest.mark.parametrize(
    ("changes", "name", "status", "words"),
    [
        ({"gpus": ()}, "GPU", "error", "CUDA_VISIBLE_DEVICES"),
        ({"gpus": (replace(H100, has_triton=False),)}, "GPU", "warning", "PyTorch's do"),
        ({"gpus": (replace(H100, free_bytes=GIB),)}, "GPU", "warning", "1.0 of 80.0 GiB free"),
        ({"compiler_problem": "no gcc"}, "C compiler", "error", "install gcc"),
        (changed("models", problem="cannot be written: x"), "models", "error", "set HF_HOME"),
        (changed("models", free_bytes=GIB), "models", "warning", "make space"),
        (changed("kernels", may_execute=False), "compiled kernels", "error", "noexec"),
        (changed("kernels", problem="x"), "compiled kernels", "error", "TRITON_CACHE_DIR"),
        (changed("temporary", problem="x"), "temporary files", "error", "set TMPDIR"),
        ({"listen_problem": "cannot listen on a:1: in use"}, "port", "error", "in use"),
        ({"open_files": 4096}, "open files", "warning", "at most 4096"),
        ({"open_files": 64}, "open files", "error", "LimitNOFILE"),
        ({"processors": 1}, "processors", "warning", "give the service two"),
        ({"free_memory": GIB}, "memory", "warning", "1.0 of 128.0 GiB free"),
        ({"software": Software("3", None, "no libX")}, "software", "error", "no libX"),
        (
            {"software": replace(MACHINE.software, triton=None), "kernels": None},
            "software", "warning", "install triton",
        ),
        (
            {"software": replace(MACHINE.software, cpu_library="no library for x")},
            "software", "warning", "no library for x",
        ),
    ],
)  # fmt: skip
def test_a_defect_is_found_with_what_to_do(changes, name, status, words):
    found = diagnose(replace(MACHINE, **changes))

    assert found[name][0] == status
    assert words in found[name][1]


def test_a_gpu_of_an_untested_kind_is_said_to_be_so():
    machine = replace(MACHINE, gpus=(replace(H100, is_tested=False),))
    (line,) = [c.finding for c in check(machine, Settings.model_validate({})) if c.name == "GPU"]

    assert "never run" in line


def test_without_a_gpu_neither_compiler_nor_kernels_are_needed():
    machine = replace(
        WITHOUT_GPU, compiler_problem="no gcc", **changed("kernels", may_execute=False)
    )

    assert diagnose(machine) == {}


def test_a_result_is_one_line_and_an_error_decides_the_status():
    checks = [Check("a", Status.OK, "fine"), Check("long", Status.ERROR, "bad", "mend it")]

    assert render(checks) == "ok       a     fine\nerror    long  bad: mend it"
    assert not has_error(checks[:1])
    assert has_error(checks)
    assert json.loads(as_json(checks)) == {
        "ok": False,
        "checks": [
            {"name": "a", "status": "ok", "finding": "fine", "advice": ""},
            {"name": "long", "status": "error", "finding": "bad", "advice": "mend it"},
        ],
    }

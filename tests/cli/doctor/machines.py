"""Machines for the checks: one on which all is well, which tests change."""

from dataclasses import replace
from pathlib import Path

from server.cli.doctor.checks import check
from server.cli.doctor.facts import GPU, Folder, Machine, Software
from server.cli.nvidia import Driver
from server.cli.settings import Settings

GIB = 2**30
H100 = GPU("NVIDIA H100 80GB HBM3 (sm_90)", True, True, 78 * GIB, 80 * GIB)
MACHINE = Machine(
    software=Software("3.12.1", "2.11.0", cuda=(13, 0), triton="3.6.0"),
    driver=Driver(True, (13, 0), "580.65.06"),
    gpus=(H100,),
    compiler_problem="",
    models=Folder(Path("/cache/hub"), "", 3 * GIB, 90 * GIB),
    kernels=Folder(Path("/cache/triton"), "", GIB, 90 * GIB),
    temporary=Folder(Path("/temporary"), "", None, 90 * GIB),
    listen_problem="",
    open_files=2**20,
    processors=16,
    processors_text="8 physical cores (16 logical processors)",
    free_memory=100 * GIB,
    total_memory=128 * GIB,
)
WITHOUT_GPU = replace(
    MACHINE,
    software=Software("3.12.1", "2.11.0+cpu", triton="3.6.0"),
    driver=Driver(has_device=False),
    gpus=(),
)


def diagnose(machine, **settings):
    """Return the checks that are not ok, by name, as (status, text)."""
    checks = check(machine, Settings.model_validate(settings))
    return {
        it.name: (it.status.value, f"{it.finding}: {it.advice}")
        for it in checks
        if it.status.value != "ok"
    }

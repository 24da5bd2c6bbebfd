"""A pytest hook that says which builds of the C library a run tests: those that this processor can run."""

from __future__ import annotations

import platform

import torch

from kernels.cpu import library


def runnable_builds() -> list[str]:
    """Return the names of the builds that this processor can run, most preferred first."""
    found = _chosen("AVX512")
    return [
        build.name
        for build in library.BUILDS
        if found is not None
        and build.machine == found.machine
        and library.cpu_features().issuperset(build.features)
    ]


def _chosen(capability: str) -> library.Build | None:
    return library.choose(platform.machine(), library.cpu_features(), capability)


def pytest_report_header() -> str:
    """Name the loaded build, those that are only compared with it, and those that no test of this run executes."""
    loaded = library.load()
    if isinstance(loaded, str):
        return f"C library: none, because {loaded}"
    chosen = _chosen(torch.backends.cpu.get_cpu_capability())
    name = chosen and chosen.name
    builds = runnable_builds()
    others = [it for it in builds if it != name]
    rest = [it.name for it in library.BUILDS if it.name not in builds]
    compared = f", compared with {', '.join(others)} by one test" if others else ""
    return f"C library: tests run {name}{compared}; this processor cannot run {', '.join(rest)}"

"""A pytest hook that says which builds of the C library a run tests: those that this processor can run."""

from __future__ import annotations

import platform

from kernels.cpu import library


def runnable_builds() -> list[str]:
    """Return the names of the builds that this processor can run, most preferred first."""
    found = library.choose(platform.machine(), library.cpu_features(), "AVX512")
    return [
        build.name
        for build in library.BUILDS
        if found is not None
        and build.machine == found.machine
        and library.cpu_features().issuperset(build.features)
    ]


def pytest_report_header() -> str:
    """Name the loaded build, those that are only compared with it, and those that no test of this run executes."""
    loaded = library.load()
    if isinstance(loaded, str):
        return f"C library: none, because {loaded}"
    name, builds = library.instructions(), runnable_builds()
    others = [it for it in builds if it != name]
    rest = [it.name for it in library.BUILDS if it.name not in builds]
    compared = f", compared with {', '.join(others)} by one test" if others else ""
    return f"C library: tests run {name}{compared}; this processor cannot run {', '.join(rest)}"

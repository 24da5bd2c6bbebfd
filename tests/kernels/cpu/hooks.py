"""pytest hooks that say which builds of the C library a run tests, and record that one has passed.

`--record-build` enters the loaded build in `builds.json` if every test of the run passes. It is for the processors that
continuous integration lacks: `make test-library` runs it once for each build that the processor can run.
`--evex-library` lets a run test the library that `tests.kernels.cpu.evex` has assembled.
"""

from __future__ import annotations

import platform
from pathlib import Path

import pytest
import torch

from kernels.cpu import library
from server.cli.bench.result import processor_name
from tests.kernels.cpu import builds, evex

_RECORDS = "record_build"


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add `--record-build` and `--evex-library`."""
    parser.addoption(
        "--record-build",
        action="store_true",
        help=f"enter the C library's loaded build in {builds.RECORD.name} if all tests pass",
    )
    parser.addoption(
        "--evex-library",
        type=Path,
        metavar="FOLDER",
        help=f"test {evex.NAME} with {evex.ENCODING} encodings, which `python -m {evex.__name__}` has assembled",
    )


def pytest_configure(config: pytest.Config) -> None:
    """Use the assembled library if there is one."""
    if folder := config.getoption("evex_library"):
        evex.use(folder)


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, exitstatus: int, config: pytest.Config
) -> None:
    """Enter the loaded build if it was asked for and every test passed."""
    if not config.getoption(_RECORDS):
        return
    name = loaded_build()
    passed = len(terminalreporter.stats.get("passed", []))
    if exitstatus or name is None or not passed:
        terminalreporter.write_line(f"{builds.RECORD.name}: nothing entered")
        return
    builds.write(name, processor_name(), passed, evex.encoding())
    terminalreporter.write_line(f"{builds.RECORD.name}: {_described(name)} passed {passed} tests")


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


def loaded_build() -> str | None:
    """Return the name of the build that tests of this process run; None without a library."""
    if isinstance(library.load(), str):
        return None
    chosen = _chosen(torch.backends.cpu.get_cpu_capability())
    return chosen and chosen.name


def _described(name: str | None) -> str:
    return f"{name} with {found} encodings" if (found := evex.encoding()) else str(name)


def _chosen(capability: str) -> library.Build | None:
    return library.choose(platform.machine(), library.cpu_features(), capability)


def pytest_report_header() -> str:
    """Name the loaded build, those that are only compared with it, and those that no test of this run executes."""
    loaded = library.load()
    if isinstance(loaded, str):
        return f"C library: none, because {loaded}"
    name = loaded_build()
    runnable = runnable_builds()
    others = [it for it in runnable if it != name]
    rest = [it.name for it in library.BUILDS if it.name not in runnable]
    compared = f", compared with {', '.join(others)} by one test" if others else ""
    return f"C library: tests run {_described(name)}{compared}; this processor cannot run {', '.join(rest)}"

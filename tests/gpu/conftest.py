"""Tests that need a CUDA device: marked, skipped without one, and never green for having been skipped.

A run that selected some of them and ran none fails; every other run says how many it ran.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent
_selected: set[str] = set()
_ran: set[str] = set()


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items):
    for item in items:
        if _HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)


def pytest_collection_finish(session):
    _selected.update(item.nodeid for item in session.items if item.get_closest_marker("gpu"))


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item):
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        pytest.skip("no CUDA device")


def pytest_runtest_logreport(report):
    if report.when == "call" and not report.skipped and report.nodeid in _selected:
        _ran.add(report.nodeid)


def pytest_sessionfinish(session, exitstatus):
    if _all_skipped(session.config) and exitstatus == pytest.ExitCode.OK:
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


def pytest_terminal_summary(terminalreporter, config):
    if not _selected or config.option.collectonly:
        return
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else "no CUDA device"
    terminalreporter.section("gpu tests")
    for report in (r for reports in terminalreporter.stats.values() for r in reports):
        for name, value in getattr(report, "user_properties", ()):
            if name == "proof" and getattr(report, "when", "") == "call":
                terminalreporter.write_line(f"{report.outcome}: {value}")
    terminalreporter.write_line(f"{len(_ran)} of {len(_selected)} gpu tests ran on {device}")
    if _all_skipped(config):
        terminalreporter.write_line(
            "FAILED: gpu tests were asked for and not one ran; that proves nothing about a GPU",
            red=True,
        )


def _all_skipped(config):
    return bool(_selected) and not _ran and not config.option.collectonly

"""Each build of the C library has passed its tests since its sources changed, on a processor that runs it."""

import pytest

from kernels.cpu import library
from tests.kernels.cpu import builds

NEVER_RUN = {"neon"}
"""No machine of the project has such a processor."""


@pytest.mark.parametrize("name", sorted({it.name for it in library.BUILDS} - NEVER_RUN))
def test_the_build_was_tested_since_its_sources_changed(name, request):
    if request.config.getoption("record_build"):
        pytest.skip("this run may enter it")
    entry = builds.read().get(name, {})

    assert entry.get("sources") == builds.sources_digest(), (
        f"the sources of the C library have changed since {name} was tested: run `make test-library` on a processor "
        f"that runs it, and commit {builds.RECORD.name}"
    )


def test_a_build_that_passes_is_entered_beside_the_others(tmp_path, monkeypatch):
    monkeypatch.setattr(builds, "RECORD", tmp_path / "builds.json")
    builds.write("b", "a processor", 3)
    builds.write("a", "another", 4)

    entries = builds.read()

    assert list(entries) == ["a", "b"]
    assert entries["b"] == {
        "sources": builds.sources_digest(), "processor": "a processor", "passed": 3,
    }  # fmt: skip


def test_a_changed_source_makes_the_entries_stale(tmp_path, monkeypatch):
    before = builds.sources_digest()
    for path in builds._NATIVE.iterdir():
        if path.is_file():
            (tmp_path / path.name).write_bytes(path.read_bytes())
    monkeypatch.setattr(builds, "_NATIVE", tmp_path)
    same = builds.sources_digest()
    (tmp_path / "dot.h").write_text((tmp_path / "dot.h").read_text() + "\n")

    assert same == before
    assert builds.sources_digest() != before

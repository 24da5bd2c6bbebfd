"""Each build of the C library has passed its tests since its sources changed, on a processor that runs it."""

import pytest

from kernels.cpu import library
from tests.kernels.cpu import builds, evex

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


def test_a_build_that_ran_in_another_encoding_says_so(tmp_path, monkeypatch):
    """Such a run proves the code of the build, not the encoding of its instructions; see `evex`."""
    monkeypatch.setattr(builds, "RECORD", tmp_path / "builds.json")

    builds.write(evex.NAME, "a processor", 3, evex.ENCODING)
    assert builds.read()[evex.NAME]["encoding"] == "EVEX"

    builds.write(evex.NAME, "a processor with the instruction", 3)
    assert "encoding" not in builds.read()[evex.NAME]


def test_only_the_encoding_of_the_instruction_is_replaced():
    lines = "\t{vex}\tvpdpbusd\t%ymm1, %ymm2, %ymm3\n\tvmulps\t%ymm1, %ymm2, %ymm3\n"

    assert evex.with_evex(lines) == lines.replace("{vex}", "{evex}")
    with pytest.raises(AssertionError):
        evex.with_evex(lines.replace("vpdpbusd", "vpdpwssd"))


@pytest.mark.parametrize(
    ("added", "reason"),
    [
        (set(), None),
        ({"avx_vnni"}, "other runs test the build itself"),
        ({"no avx512_vnni"}, "lacks avx512_vnni"),
    ],
)
def test_encodings_are_replaced_only_where_no_other_way_tests_the_build(added, reason):
    features = {"avx2", "fma3", "f16c", "avx512_f", "avx512_vl", "avx512_vnni"} | added
    features -= {it.removeprefix("no ") for it in added if it.startswith("no ")}

    found = evex.unneeded(frozenset(features))

    assert (found is None) is (reason is None)
    assert reason is None or reason in found


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

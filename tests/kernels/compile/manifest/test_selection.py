"""The compilations that a run makes: what no run has made, one of each group, and a sample of the rest."""

import pytest

from tests.kernels.compile.manifest.selection import (
    MANIFEST,
    ONE_IN,
    Compilation,
    chosen,
    read_manifest,
    write_manifest,
)

MANY = {
    str(i): Compilation(f"{i:016x}", ("test", "kernel", 80 + i % 2), always=False)
    for i in range(160 * ONE_IN)
}
ALL = {it.digest for it in MANY.values()}


def test_what_the_manifest_lacks_is_compiled():
    known = ALL - {MANY["7"].digest, MANY["9"].digest}

    assert {name for name, why in chosen(MANY, known, "a").items() if why == "missing"} == {
        "7",
        "9",
    }


def test_without_a_manifest_everything_is_compiled():
    assert set(chosen(MANY, set(), "a").values()) == {"missing"}
    assert set(chosen(MANY, set(), "a")) == set(MANY)


def test_each_test_kernel_and_compute_capability_has_a_representative():
    groups = [("a", "x", 80), ("a", "y", 80), ("a", "x", 90), ("b", "x", 80)]
    known = {
        f"{group}{i}": Compilation(f"{i:016x}", group, always=False)
        for i in range(3)
        for group in groups
    }

    choice = chosen(known, {it.digest for it in known.values()}, "a")
    found = [known[name].group for name, why in choice.items() if why == "representative"]

    assert found == groups


def test_a_compilation_of_the_fast_tests_represents_its_group_wherever_it_stands():
    group = ("test", "kernel", 90)
    first = Compilation("0" * 16, group, always=False)
    fast = Compilation("1" * 16, group, always=True)

    found = chosen({"first": first, "fast": fast}, {"0" * 16}, "a")

    assert found.pop("fast") == "fast"
    assert set(found.values()) <= {"sample"}


def test_a_sixteenth_of_the_rest_is_compiled_and_another_sixteenth_for_another_commit():
    samples = [
        {name for name, why in chosen(MANY, ALL, commit).items() if why == "sample"}
        for commit in ("a", "a", "b")
    ]

    assert samples[0] == samples[1] != samples[2]
    for sample in samples:
        assert 0.7 < len(sample) * ONE_IN / len(MANY) < 1.3


def test_every_known_compilation_is_in_the_sample_of_some_commit():
    few = dict(list(MANY.items())[:50])
    seen = {name for commit in range(400) for name in chosen(few, ALL, str(commit))}

    assert seen == set(few)


def test_a_manifest_is_sorted_and_replaced_as_a_whole(tmp_path):
    path = tmp_path / "compilations.txt"
    assert read_manifest(path) == set()

    write_manifest(["b" * 16, "a" * 16, "b" * 16], path)

    assert path.read_text() == "a" * 16 + "\n" + "b" * 16 + "\n"
    assert read_manifest(path) == {"a" * 16, "b" * 16}
    assert [it.name for it in tmp_path.iterdir()] == [path.name]


@pytest.mark.parametrize(
    ("lines", "error"),
    [
        (["b" * 16, "a" * 16], "not sorted"),
        (["a" * 16, "a" * 16], "not sorted and distinct"),
        (["a" * 15], "'aaaaaaaaaaaaaaa' is not 16"),
        (["<<<<<<< ours", "a" * 16], "'<<<<<<< ours' is not 16 hexadecimal digits"),
    ],
)
def test_a_damaged_manifest_is_an_error_that_names_the_line(lines, error, tmp_path):
    path = tmp_path / "compilations.txt"
    path.write_text("\n".join(lines) + "\n")

    with pytest.raises(ValueError, match=error):
        read_manifest(path)


def test_the_manifest_of_the_project_is_in_order():
    assert len(read_manifest()) > 1000
    assert MANIFEST.stat().st_size < 64 * 1024

"""Which compilations a run repeats, of those that `compilations.txt` says have succeeded."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from tests.commit_share import draw

if TYPE_CHECKING:
    from collections.abc import Iterable, Mapping

MANIFEST = Path(__file__).with_name("compilations.txt")
"""Digests of the compilations whose tests have passed, one a line, sorted; `make compilations` writes it."""
DIGITS = 16
"""Hexadecimal digits of a digest."""
ONE_IN = 16
"""Of so many known compilations a run repeats about one, to check the manifest."""


@dataclass(frozen=True)
class Compilation:
    """What a test compiles.

    Attributes:
        digest: of all that the test's result depends on.
        group: the test, the kernel and the compute capability.
        always: whether a run of the fast tests compiles it.
    """

    digest: str
    group: tuple[str, str, int]
    always: bool


def chosen(compilations: Mapping[str, Compilation], known: set[str], commit: str) -> dict[str, str]:
    """Choose the compilations that a run makes, and say why.

    Args:
        compilations: by the names of their tests, in the order of the tests.
        known: digests of the manifest.
        commit: hash of the commit under test. Another one chooses others.

    Returns:
        For some of the names "fast", "missing" from the manifest, the first of a group, as "representative" where the
        group has no fast test, or part of the "sample" that checks the manifest.
    """
    found: dict[str, str] = {}
    seen = {it.group for it in compilations.values() if it.always}
    for name, it in compilations.items():
        if it.always:
            found[name] = "fast"
        elif it.digest not in known:
            found[name] = "missing"
        elif it.group not in seen:
            found[name] = "representative"
        elif draw(it.digest, commit) % ONE_IN == 0:
            found[name] = "sample"
        seen.add(it.group)
    return found


def read_manifest(path: Path = MANIFEST) -> set[str]:
    """Return the digests of a manifest; none if there is no such file.

    Raises:
        ValueError: a line is not a digest, or the lines are not sorted and distinct, as after a wrong merge.
    """
    lines = path.read_text(encoding="ascii").splitlines() if path.exists() else []
    for line in lines:
        if len(line) != DIGITS or set(line) - set("0123456789abcdef"):
            raise ValueError(f"{path.name}: {line!r} is not {DIGITS} hexadecimal digits")
    if lines != sorted(set(lines)):
        raise ValueError(f"{path.name}: the lines are not sorted and distinct")
    return set(lines)


def write_manifest(digests: Iterable[str], path: Path = MANIFEST) -> None:
    """Replace a manifest as a whole, so that an interruption leaves the old one or the new one."""
    draft = path.with_suffix(".draft")
    draft.write_text("".join(f"{it}\n" for it in sorted(set(digests))), encoding="ascii")
    draft.replace(path)

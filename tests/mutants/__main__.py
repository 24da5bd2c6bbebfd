"""Applies mistakes to critical code one by one, runs the tests that reach each, and reports those that none notices.

    make mutants                                        one mutant in three of each function
    python -m tests.mutants --digits 0123456789         all
    python -m tests.mutants --only model/text           one folder or file
    python -m tests.mutants --report                    the score of the last run, without another one

mutmut makes the mutants and runs the tests; `[tool.mutmut]` in pyproject.toml has the files, and the tests that must
notice. A mutant has the number of its place in its function, of which `--digits` selects the last digit: the same
mutants at each run, as long as the function is the same.

`equivalent.json` names mutants that behave as the original does, by file and changed line, and says why. They count
neither as killed nor as survivors.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tomllib
from collections import Counter, defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

ROOT: Final = Path(__file__).parents[2]
MUTANTS: Final = ROOT / "mutants"
EQUIVALENT: Final = Path(__file__).with_name("equivalent.json")
_NO_TEST: Final = (5, 33)
_SURVIVED: Final = (0, *_NO_TEST)
"""Exit codes: the tests pass, or none reaches the function. All others are noticed: a failure, a crash, a limit."""
_NOT_RUN: Final = (None, 2, 34, 255)
"""255: pytest could not run, for example because the name of a parametrized test has brackets."""
_TIMED_OUT: Final = (24, 36, 152, -24)


class Mutant(NamedTuple):
    """A mutant that was run.

    Attributes:
        name: by which `mutmut show` and `mutmut run` know it.
        file: the source file, relative to the repository.
        code: exit code of its tests.
    """

    name: str
    file: str
    code: int

    @property
    def survived(self) -> bool:
        """Whether no test has noticed."""
        return self.code in _SURVIVED


class Change(NamedTuple):
    """What a mutant changes: the lines that it removes and adds, without their indentation."""

    file: str
    removed: str
    added: str


def main(arguments: list[str] | None = None) -> int:
    """Run mutants, print the score of each file, and write the survivors.

    Returns:
        Exit status; 0 also with survivors.
    """
    parser = _parser()
    options = parser.parse_args(arguments)
    if not options.digits.isdecimal():
        parser.error(f"--digits: {options.digits!r} must be digits, such as 258")
    if options.jobs < 1:
        parser.error(f"--jobs is {options.jobs}; at least 1 is needed")
    selected = mutated_files(ROOT)
    if not any(file.startswith(options.only) for file in selected):
        parser.error(f"--only: {options.only!r} has no file of {', '.join(selected)}")
    if not options.report:
        shutil.rmtree(MUTANTS, ignore_errors=True)
        pattern = f"{options.only.removesuffix('.py').replace('/', '.')}*[{options.digits}]"
        program = Path(sys.executable).with_name("mutmut")
        command = [program, "run", "--max-children", str(options.jobs), pattern]
        done = subprocess.run(command, cwd=ROOT, check=False)
        if done.returncode:
            return done.returncode
    os.chdir(ROOT)  # mutmut reads pyproject.toml there
    found = list(run_mutants(MUTANTS, options.digits, options.only))
    known = json.loads(EQUIVALENT.read_text())
    survivors = [(mutant, change_of(mutant)) for mutant in found if mutant.survived]
    equivalent = {mutant: why for mutant, change in survivors if (why := reason(known, change))}
    print(table(found, equivalent))
    if options.output:
        result = {
            "digits": options.digits,
            "score": score(found, equivalent),
            "mutants": len(found),
            "equivalent": len(equivalent),
            "survivors": [
                {"mutant": mutant.name, "tests": mutant.code == 0, **change._asdict()}
                for mutant, change in survivors
                if mutant not in equivalent
            ],
        }
        options.output.write_text(json.dumps(result, indent=1, ensure_ascii=False) + "\n")
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="python -m tests.mutants", description=__doc__.split("\n")[0]
    )
    parser.add_argument(
        "--digits", default="258", help="last digits of the numbers of the mutants that run"
    )
    parser.add_argument("--only", default="", help="a folder or file")
    parser.add_argument("--jobs", type=int, default=2, help="processes")
    parser.add_argument("--report", action="store_true", help="run nothing")
    parser.add_argument(
        "--output", type=Path, help="write score and survivors to this file, as JSON"
    )
    return parser


def mutated_files(root: Path) -> list[str]:
    """Return the files whose mutants are made, relative to the repository, as `[tool.mutmut]` selects them."""
    settings = tomllib.loads((root / "pyproject.toml").read_text())["tool"]["mutmut"]
    found = {path for pattern in settings["only_mutate"] for path in root.glob(pattern)}
    return sorted(str(path.relative_to(root)) for path in found if path.name != "__init__.py")


def run_mutants(folder: Path, digits: str, only: str = "") -> Iterable[Mutant]:
    """Yield the mutants of a selection that have run, by file.

    Args:
        folder: where mutmut has written them.
        digits: the last digits of their numbers.
        only: a folder or file.
    """
    for path in sorted(folder.rglob("*.py.meta")):
        file = str(path.relative_to(folder)).removesuffix(".meta")
        if not file.startswith(only):
            continue
        for name, code in json.loads(path.read_text())["exit_code_by_key"].items():
            if code not in _NOT_RUN and name[-1] in digits:
                yield Mutant(name, file, code)


def change_of(mutant: Mutant) -> Change:
    """Return what a mutant changes."""
    from mutmut.mutation.diff_apply import get_diff_for_mutant

    diff = get_diff_for_mutant(mutant.name, path=Path(mutant.file)).splitlines()
    removed, added = (
        " ".join(line[1:].strip() for line in diff if line.startswith(sign) and line[1:2] != sign)
        for sign in "-+"
    )
    return Change(mutant.file, removed, added)


def reason(known: list[dict[str, str]], change: Change) -> str | None:
    """Return why a change is none of behaviour; None if it is not known to be so.

    Args:
        known: `equivalent.json`. An entry without a file is of all files, one without `removed` of every line with the
            text `added`.
        change: the change.
    """
    for entry in known:
        if (
            entry.get("file", change.file) == change.file
            and entry.get("removed", change.removed) == change.removed
            and entry["added"] in change.added
        ):
            return entry["why"]
    return None


def score(mutants: list[Mutant], equivalent: Iterable[Mutant]) -> float:
    """Return the share of mutants that tests notice, in per cent of those that are not equivalent."""
    counted = [mutant for mutant in mutants if mutant not in set(equivalent)]
    killed = sum(not mutant.survived for mutant in counted)
    return round(100 * killed / max(1, len(counted)), 1)


def table(mutants: list[Mutant], equivalent: Iterable[Mutant]) -> str:
    """Return the counts and the score of each file as text."""
    equivalent = set(equivalent)
    counts: dict[str, Counter[str]] = defaultdict(Counter)
    for mutant in mutants:
        kind = "equivalent" if mutant in equivalent else "survived" if mutant.survived else "killed"
        for file in (mutant.file, "all"):
            counts[file][kind] += 1
            counts[file]["time limit"] += mutant.code in _TIMED_OUT
            counts[file]["no test"] += mutant.code in _NO_TEST
    kinds = ("killed", "survived", "equivalent", "no test", "time limit")
    lines = [f"{'file':48}" + "".join(f"{kind:>12}" for kind in (*kinds, "score"))]
    for file, found in counts.items():
        if file != "all":
            lines.append(_line(file, found, kinds))
    return "\n".join([*lines, _line("all", counts["all"], kinds)])


def _line(file: str, counts: Counter[str], kinds: tuple[str, ...]) -> str:
    share = 100 * counts["killed"] / max(1, counts["killed"] + counts["survived"])
    return f"{file:48}" + "".join(f"{counts[kind]:>12}" for kind in kinds) + f"{share:>11.1f}%"


if __name__ == "__main__":
    sys.exit(main())

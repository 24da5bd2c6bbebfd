"""Each fuzzing target, for a moment; `python -m tests.reliability.fuzz` runs them for long."""

import random
import sys

import pytest

from tests.reliability.fuzz import runner
from tests.reliability.fuzz.__main__ import TARGETS, make_target

CASES = {"http": 150, "protocol": 300, "tokenizer": 40, "safetensors": 40}
LONG = {"http": 20_000, "protocol": 20_000, "tokenizer": 2_000, "safetensors": 2_000}


@pytest.fixture(scope="module", params=sorted(TARGETS))
def target(request):
    made = make_target(request.param)
    yield request.param, made
    made.close()


def run(target, seed, count):
    rng = random.Random(seed)
    for _ in range(count):
        target.check(target.make(rng))


def test_a_few_cases_have_no_finding(target):
    name, made = target

    run(made, 1, CASES[name])


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_many_cases_have_no_finding(target):
    name, made = target

    run(made, 2, LONG[name])


def test_the_same_seed_makes_the_same_cases(target):
    _, made = target

    assert [made.make(random.Random(5)) for _ in range(2)] == [made.make(random.Random(5))] * 2


BROKEN = """
import sys, os, time
from tests.reliability.fuzz import runner
class Broken:
    count = 0
    def make(self, rng):
        self.count += 1
        return b"case %d" % self.count
    def check(self, case):
        if case == b"case 3":
            raise ValueError("odd")
        if case == b"case 5":
            {ending}
slot, seed, folder = sys.argv[1:]
runner.run_child(Broken(), slot, int(seed), __import__("pathlib").Path(folder))
"""


@pytest.mark.parametrize(
    ("ending", "kind"),
    [("os.abort()", "ended with code -6"), ("time.sleep(60)", "took more than 1 s")],
)
def test_a_case_that_raises_and_one_that_ends_or_hangs_the_process_are_stored(
    tmp_path, monkeypatch, ending, kind
):
    started = runner.subprocess.Popen

    def start(command, **options):
        slot = command[command.index("--child") + 1]
        code = BROKEN.format(ending=ending)
        return started([sys.executable, "-c", code, slot, "1", str(tmp_path / "f")], **options)

    monkeypatch.setattr(runner.subprocess, "Popen", start)

    count = runner.fuzz("none", 3, 1, 1.0, tmp_path / "f")

    found = {f.kind: f.file.read_bytes() for f in runner.findings(tmp_path / "f")}
    assert count >= 5
    assert len(found) == 2
    assert next(case for name, case in found.items() if kind in name) == b"case 5"
    assert next(case for name, case in found.items() if "ValueError at" in name) == b"case 3"

"""A compilation's key changes with all that its result depends on, and with nothing else."""

import ast
import json
import os
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from tests.kernels.compile.manifest import source_key
from tests.kernels.compile.manifest.source_key import checks_key, digest_of, tree_text
from tests.kernels.triton_interpreter import HAS_TRITON

ROOT = Path(__file__).parents[4]
PROGRAM = '''
"""A module."""
import re

@decorated(1)
def f(a, /, b: int = 3, *args, c=None, **named) -> str:
    """Explain."""
    x = [i for i in args if i > 0.1]  # a comment
    with open("a") as file, open("b"):
        x += (y := -2), 1e-6, True, None, b"\\x00", ...
    text = f"{a!r:>{b}} and {c}" "joined"
    match a:
        case {"k": [1, *rest]} if rest:
            return lambda: text
    try:
        del x[1:2, ...]
    except (KeyError, ValueError) as error:
        raise TypeError from error
'''


def text_of(program):
    return tree_text(ast.parse(textwrap.dedent(program)))


def test_the_text_of_a_program_is_the_same_in_every_version_of_python():
    assert digest_of(text_of(PROGRAM))[:16] == "c906a97c96d23bc0"


def test_layout_comments_and_docstrings_do_not_change_the_text():
    assert text_of("def f(a):\n    '''Say.'''\n    return a + 1  # why\n") == text_of(
        "# more\n\ndef f(\n    a,\n):\n    return (a\n            + 1)\n"
    )


@pytest.mark.parametrize(
    "other", ["a + 2", "a - 1", "b + 1", "a + 1.0", "a + True", "(a + 1,)", "(a + 1, '')"]
)
def test_every_change_of_meaning_changes_the_text(other):
    assert text_of(f"x = {other}") != text_of("x = a + 1")


def test_an_object_that_differs_in_every_process_is_refused():
    with pytest.raises(AssertionError, match="differs in every process"):
        digest_of("a", object())


TESTS = """
from tests.kernels.compile.test_other import faults as found, unused
LIMIT: int = 3
CASES = [1, 2]
OTHER = 5

def helper(facts):
    return facts < LIMIT

@parametrize("case", CASES)
def test_it(case):
    assert helper(case), found(case)

def test_more(case):
    assert case < OTHER
"""
IMPORTED = """
WORST = 7

def faults(facts):
    return facts > WORST

def unused(facts):
    return 1
"""


@pytest.mark.parametrize(
    ("old", "new", "is_stale"),
    [
        ("LIMIT: int = 3", "LIMIT: int = 4", True),
        ("facts < LIMIT", "facts <= LIMIT", True),
        ("assert helper(case)", "assert not helper(case)", True),
        ("WORST = 7", "WORST = 8", True),
        ("CASES = [1, 2]", "CASES = [1, 2, 3]", False),
        ("OTHER = 5", "OTHER = 6", False),
        ("return 1", "return 2", False),
        ("def helper(facts):", "# Why.\ndef helper(facts):", False),
    ],
)
def test_a_changed_check_makes_the_results_of_its_test_stale(
    old, new, is_stale, tmp_path, monkeypatch
):
    keys = []
    for name, change in (("before", lambda it: it), ("after", lambda it: it.replace(old, new))):
        monkeypatch.setattr(source_key, "_ROOT", tmp_path / name)
        folder = tmp_path / name / "tests" / "kernels" / "compile"
        folder.mkdir(parents=True)
        (folder / "test_other.py").write_text(change(IMPORTED))
        (folder / "test_it.py").write_text(change(TESTS))
        keys.append(checks_key(folder / "test_it.py", "test_it"))

    assert (keys[0] != keys[1]) is is_stale


KERNELS = """
import triton
import triton.language as tl
from triton.language.core import _aggregate as aggregate

SCALE = tl.constexpr(2)

@aggregate
class Pair:
    first: tl.tensor
    KIND: tl.constexpr

    @triton.constexpr_function
    def __init__(self, first, kind):
        self.first = first
        self.KIND = kind

@triton.jit
def deep(value):
    return value * SCALE

@triton.jit
def called(value):
    pair = Pair(value, 1)
    return deep(pair.first) + 1.0

@triton.jit
def add(x, n, SIZE: tl.constexpr, FUNCTION: tl.constexpr):
    at = tl.arange(0, SIZE)
    tl.store(x + at, FUNCTION(tl.load(x + at)) + n)

@triton.jit
def unrelated(x):
    return x
"""
SCRIPT = """
import importlib, json, sys
from types import SimpleNamespace
import torch, triton
from tests.kernels.compile import cross_compile_worker as worker

class Launcher(worker.Compiler):
    def launch(self, job):
        self.compiled = []
        module = importlib.import_module(job.module)
        x = torch.zeros(64, dtype=getattr(torch, job.dtype))[job.first:]
        module.add[(1,)](x, job.n, SIZE=job.size, FUNCTION=module.called, num_warps=job.warps)

compiler, found = Launcher(), {}

def key(name, **changes):
    fields = {"module": "kernels_0", "dtype": "float32", "first": 0, "n": 3, "size": 64, "warps": 4, "sm": 90}
    job = SimpleNamespace(**fields | changes, function="", to_json=dict)
    found[name] = compiler.key(job)["key"]

sys.path.insert(0, sys.argv[1])
for name, changes in json.loads(sys.argv[2]).items():
    key(name, **changes)
for name, holder, attribute, value in (
    ("version", triton, "__version__", "3.6.1"),
    ("assembler", triton.backends.nvidia.compiler, "get_ptxas_version", lambda arch: "other"),
    ("facts", worker, "FACTS_VERSION", "other"),
):
    before = getattr(holder, attribute)
    setattr(holder, attribute, value)
    key(name)
    setattr(holder, attribute, before)
print(json.dumps(found))
"""
SOURCES = {
    "same": ("", ""),
    "lines": ("SCALE = tl", "\n\nSCALE = tl"),
    "comment": ("    return deep", "    # Why.\n    return deep"),
    "unrelated": ("    return x", "    return x + 1"),
    "own source": ("+ n)", "- n)"),
    "called source": (" + 1.0", " + 2.0"),
    "source called by another": ("value * SCALE", "value / SCALE"),
    "global constant": ("tl.constexpr(2)", "tl.constexpr(4)"),
    "constant of an argument's default": (
        "FUNCTION: tl.constexpr):",
        "FUNCTION: tl.constexpr = 1):",
    ),
    "fields": ("KIND: tl.constexpr\n", "KIND: tl.constexpr\n    MORE: tl.constexpr\n"),
    "inlining": ("@triton.jit\ndef deep", "@triton.jit(noinline=True)\ndef deep"),
}
LAUNCHES = {
    "equal value": {"n": 5},
    "constant": {"size": 32},
    "warps": {"warps": 8},
    "dtype": {"dtype": "bfloat16"},
    "alignment": {"first": 1},
    "value that is specialized": {"n": 1},
    "architecture": {"sm": 80},
}
COMPILERS = ("version", "assembler", "facts")
SAME = {"same", "lines", "comment", "unrelated", "equal value"}


@pytest.fixture(scope="module")
def keys(tmp_path_factory):
    """The keys of a kernel and of variants of it, from two processes that must agree."""
    folder = tmp_path_factory.mktemp("kernels")
    jobs = dict(LAUNCHES)
    for i, (name, change) in enumerate(SOURCES.items()):
        source = KERNELS.replace(*change)
        assert name == "same" or source != KERNELS
        (folder / f"kernels_{i}.py").write_text(source)
        jobs[name] = {"module": f"kernels_{i}"}
    environment = {key: value for key, value in os.environ.items() if key != "TRITON_INTERPRET"}
    processes = [
        subprocess.Popen(
            [sys.executable, "-c", SCRIPT, folder, json.dumps(jobs)],
            stdout=subprocess.PIPE,
            text=True,
            cwd=ROOT,
            env=environment | {"PYTHONHASHSEED": seed},
        )
        for seed in "12"
    ]
    found = [json.loads(process.communicate()[0]) for process in processes]
    assert found[0] == found[1]
    return found[0]


@pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")
@pytest.mark.parametrize("name", [*SOURCES, *LAUNCHES, *COMPILERS])
def test_a_changed_source_constant_launch_or_compiler_makes_a_compilation_stale(name, keys):
    assert (keys[name] == keys["same"]) is (name in SAME)

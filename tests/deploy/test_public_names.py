"""The names that programs import from `tessera`: one table, types, and examples that are right."""

import ast
import asyncio
import doctest
import subprocess
import sys
from pathlib import Path

import pytest
import tessera
import torch
from fastapi import FastAPI

from tests.client.conftest import default_service, service  # noqa: F401 - fixtures

SOURCE = Path(tessera.__file__).read_text()
NAMES = [name for name in tessera.__all__ if name != "__version__"]
SERVICE = ("embedded_service", "EmbeddedService", "ModelError", "StartupError", "ChildStartError")
"""Their examples start an engine."""


def imported_for_type_checkers():
    found = {}
    for node in ast.parse(SOURCE).body:
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for line in node.body:
                if isinstance(line, ast.ImportFrom):
                    found |= {it.asname: line.module for it in line.names if it.asname == it.name}
    return found


def run_examples(name, **more):
    """Run the examples of a name and of its methods; return how many there are and what they printed."""
    printed = []
    runner = doctest.DocTestRunner(verbose=False)
    names = {name: getattr(tessera, name) for name in NAMES}
    names |= {"asyncio": asyncio, "torch": torch, "FastAPI": FastAPI, **more}
    found = doctest.DocTestFinder().find(names[name], name, module=False, globs=names)
    for test in found:
        runner.run(test, out=printed.append)
    return sum(len(test.examples) for test in found), "".join(printed)


def test_type_checkers_see_the_names_of_the_table():
    assert imported_for_type_checkers() == tessera._MODULE_OF


def test_every_name_is_where_the_table_says():
    for name in NAMES:
        assert getattr(tessera, name).__doc__, name
    assert set(tessera.__all__) <= set(dir(tessera))


def test_an_unknown_name_is_an_attribute_error():
    with pytest.raises(AttributeError, match="module 'tessera' has no attribute 'nothing'"):
        _ = tessera.nothing


@pytest.mark.parametrize("name", sorted(set(NAMES) - set(SERVICE)))
def test_the_examples_of_a_name_are_right(name, default_service):  # noqa: F811 - the fixture
    with tessera.Client() as client:
        examples, printed = run_examples(name, client=client)

    assert printed == ""
    assert examples, "a public name has an example"


@pytest.mark.e2e
@pytest.mark.parametrize("name", SERVICE)
def test_the_examples_that_start_an_engine_are_right(name):
    examples, printed = run_examples(name)

    assert printed == ""
    assert examples, "a public name has an example"


@pytest.mark.parametrize(
    ("program", "absent"),
    [
        (
            "import tessera; tessera.__version__",
            ("torch", "fastapi", "pydantic", "httpx2", "numpy"),
        ),
        ("from tessera import AsyncClient, Client", ("torch", "fastapi", "pydantic", "numpy")),
        ("from tessera import Settings, embedded_service", ("torch", "triton")),
        ("from tessera import flash_attention", ("fastapi", "httpx2", "pydantic")),
    ],
)
def test_a_name_imports_only_what_it_needs(program, absent):
    script = f"{program}\nimport sys\nprint(*(name for name in {absent} if name in sys.modules))"

    found = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=True
    )

    assert found.stdout.split() == []

"""The service never runs code that it reads, and never hands a text to a shell."""

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("kernels", "model", "server", "deploy")
MODULES = {
    "pickle",
    "cPickle",
    "dill",
    "cloudpickle",
    "marshal",
    "shelve",
    "joblib",
    "code",
    "codeop",
}
CALLS = {
    "eval", "exec", "compile", "__import__", "os.system", "os.popen", "torch.hub.load", "yaml.load", "yaml.unsafe_load",
    "yaml.full_load", "subprocess.getoutput", "subprocess.getstatusoutput", "runpy.run_path", "runpy.run_module",
    "asyncio.create_subprocess_shell",
}  # fmt: skip
# What makes a call unsafe, by the names of its keyword arguments.
ARGUMENTS = {
    "shell": {True},
    "trust_remote_code": {True},
    "allow_pickle": {True},
    "weights_only": {False},
}


def unsafe(source: str) -> Iterator[str]:
    """Yield the unsafe imports and calls of a module."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            yield from (a.name for a in node.names if a.name.split(".")[0] in MODULES)
        elif isinstance(node, ast.ImportFrom) and (node.module or "").split(".")[0] in MODULES:
            yield str(node.module)
        elif isinstance(node, ast.Call):
            if (name := ast.unparse(node.func)) in CALLS:
                yield name
            if name == "torch.load" and "weights_only" not in {k.arg for k in node.keywords}:
                yield name
            for keyword in node.keywords:
                value = keyword.value
                safe = isinstance(value, ast.Constant) and value.value not in ARGUMENTS.get(
                    str(keyword.arg), ()
                )
                if keyword.arg in ARGUMENTS and not safe:
                    yield f"{name}({keyword.arg}=...)"


def test_nothing_unsafe_is_imported_or_called():
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]

    found = {str(f.relative_to(ROOT)): list(unsafe(f.read_text())) for f in files}

    assert len(files) > 100
    assert {name: calls for name, calls in found.items() if calls} == {}


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads", "eval('1')", "torch.load(f)",
        "torch.load(f, weights_only=False)", "subprocess.run(c, shell=True)",
        "subprocess.run(c, shell=flag)", "f(trust_remote_code=True)", "yaml.load(t)", "np.load(f, allow_pickle=True)",
    ],
)  # fmt: skip
def test_what_is_unsafe_is_found(source):
    assert list(unsafe(source))


@pytest.mark.parametrize(
    "source",
    ["model.eval()", "torch.load(f, weights_only=True)", "subprocess.run(c, shell=False)", "import msgspec"],
)  # fmt: skip
def test_what_looks_similar_is_not(source):
    assert list(unsafe(source)) == []


def test_a_deadline_or_an_interval_never_depends_on_the_wall_clock():
    """A step of the clock then changes only the dates in replies and in benchmarks."""
    allowed = {
        "server/http/dialects/openai/routes.py", "server/http/dialects/openai/responses_api/format.py",
        "server/http/dialects/openai/reply_format.py", "server/cli/bench/result.py", "model/text/rendering/renderer.py",
        "server/http/tracing.py", "server/http/metrics/process.py", "server/log.py",
        "server/cli/local_models/commands.py",
    }  # fmt: skip
    words = ("time.time(", "time.time_ns(", "datetime.now(", "datetime.datetime.now(", "utcnow(")
    files = [file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py")]

    found = {
        str(f.relative_to(ROOT)) for f in files if any(word in f.read_text() for word in words)
    }

    assert found <= allowed

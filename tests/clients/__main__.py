"""Runs real clients against a service with the bundled model; prints their versions and what failed.

    python -m tests.clients [--folder FOLDER] [--url URL] [NAME ...]

Each client gets an environment of its own in FOLDER, with the newest packages of PyPI or npm; they are kept for the
next run. Without URL, a service is started. What the model says does not matter, what the protocol does does.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
import venv
from pathlib import Path
from typing import TYPE_CHECKING, Final, NamedTuple

from benchmarks.service import service
from model.hub.resolve import BUNDLED, resolve

if TYPE_CHECKING:
    from collections.abc import Iterator

_HERE: Final = Path(__file__).parent
_SCENARIO_SECONDS: Final = 900


class Client(NamedTuple):
    """A client.

    Attributes:
        scenario: file in this folder; `.py` runs in an environment of Python, `.mjs` in one of Node.js.
        packages: of PyPI, or of npm.
        program: of npm, whose path the scenario gets; None for a library.
    """

    scenario: str
    packages: tuple[str, ...]
    program: str | None = None


CLIENTS: Final = {
    "ag2": Client("ag2_.py", ("ag2[openai]",)),
    "agent-framework": Client(
        "agent_framework_.py", ("agent-framework-core", "agent-framework-openai")
    ),
    "ai-sdk": Client(
        "ai_sdk.mjs",
        ("ai", "@ai-sdk/openai", "@ai-sdk/openai-compatible", "@ai-sdk/anthropic", "zod"),
    ),
    "anthropic": Client("anthropic_.py", ("anthropic",)),
    "anthropic-ts": Client("anthropic.mjs", ("@anthropic-ai/sdk",)),
    "claude-code": Client("claude_code.py", ("@anthropic-ai/claude-code",), "claude"),
    "codex": Client("codex.py", ("@openai/codex",), "codex"),
    "guidance": Client("guidance_.py", ("guidance", "openai")),
    "instructor": Client("instructor_.py", ("instructor",)),
    "langchain": Client("langchain_.py", ("langchain-core", "langchain-openai")),
    "openai-agents": Client("openai_agents.py", ("openai-agents",)),
    "outlines": Client("outlines_.py", ("outlines", "openai", "huggingface_hub")),
    "pydantic-ai": Client("pydantic_ai_.py", ("pydantic-ai-slim[openai]",)),
    "semantic-kernel": Client("semantic_kernel_.py", ("semantic-kernel",)),
    "text-generation": Client("text_generation_.py", ("text-generation",)),
}


def main() -> int:
    """Run the clients; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("names", nargs="*", choices=[[], *CLIENTS], metavar="NAME")
    parser.add_argument(
        "--folder", type=Path, default=Path(tempfile.gettempdir(), "tessera-clients")
    )
    parser.add_argument("--url")
    options = parser.parse_args()
    failed = []
    with contextlib.ExitStack() as stack:
        url = options.url or stack.enter_context(_service())
        for name in options.names or CLIENTS:
            command, versions = _install(CLIENTS[name], options.folder / name)
            print(f"== {name}: {', '.join(f'{p} {v}' for p, v in versions.items())}", flush=True)
            ended = subprocess.run(
                [*command[:2], url, *command[2:]],
                cwd=options.folder / name,
                env={**os.environ, "PYTHONWARNINGS": "ignore"},
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                text=True,
                timeout=_SCENARIO_SECONDS,
                check=False,
            )
            lines = ended.stdout.splitlines()
            if ended.returncode:
                failed.append(name)
                print(ended.stdout)
            print(f"   {sum(line.startswith('ok ') for line in lines)} steps passed", flush=True)
    print(f"failed: {', '.join(failed) or 'none'}")
    return bool(failed)


def _install(client: Client, folder: Path) -> tuple[list[str], dict[str, str]]:
    """Install a client; return the command of its scenario, and the versions of its packages."""
    folder.mkdir(parents=True, exist_ok=True)
    scenario = _HERE / client.scenario
    if client.program or scenario.suffix == ".mjs":
        subprocess.run(
            ["npm", "install", "--no-audit", "--no-fund", "--silent", *client.packages],
            cwd=folder,
            check=True,
        )
        manifests = [folder / "node_modules" / name / "package.json" for name in client.packages]
        versions = {
            name: str(json.loads(manifest.read_text())["version"])
            for name, manifest in zip(client.packages, manifests, strict=True)
        }
        if client.program:
            program = folder / "node_modules" / ".bin" / client.program
            return [sys.executable, str(scenario), str(program)], versions
        # Node.js looks for packages beside the script.
        copy = folder / scenario.name
        copy.write_bytes(scenario.read_bytes())
        return ["node", str(copy)], versions
    python = folder / "bin" / "python"
    if not python.exists():
        venv.create(folder, with_pip=True)
        pip = [str(python), "-m", "pip", "--disable-pip-version-check", "install", "--quiet"]
        subprocess.run([*pip, *client.packages], check=True)
    names = [package.partition("[")[0] for package in client.packages]
    script = (
        "import json, sys, importlib.metadata as m\n"
        "print(json.dumps({n: m.version(n) for n in sys.argv[1:]}))"
    )
    found = subprocess.run(
        [str(python), "-c", script, *names], check=True, capture_output=True, text=True
    )
    return [str(python), str(scenario)], json.loads(found.stdout)


@contextlib.contextmanager
def _service() -> Iterator[str]:
    """Serve the bundled model with more positions than it was trained with: the prompts of Codex have 13,000 tokens."""
    with tempfile.TemporaryDirectory() as folder:
        shutil.copytree(resolve(BUNDLED), folder, dirs_exist_ok=True)
        path = Path(folder, "config.json")
        path.write_text(
            json.dumps(json.loads(path.read_text()) | {"max_position_embeddings": 32768})
        )
        with service((f"--model={folder}", "--served-model-name=bundled")) as (url, _):
            yield url


if __name__ == "__main__":
    sys.exit(main())

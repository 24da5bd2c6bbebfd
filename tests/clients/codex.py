"""Codex CLI: turns on a scripted task, by Responses.

Run with the path of `codex` as second argument.
"""

import json
import os
import subprocess
import sys
import tempfile
from pathlib import Path

from scenario import MODEL, run, url


def turns():
    """Let Codex answer, and answer again in the same conversation."""
    with tempfile.TemporaryDirectory() as folder:
        home = Path(folder, "home")
        home.mkdir()
        Path(home, "config.toml").write_text(
            f'model = "{MODEL}"\nmodel_provider = "tessera"\nmodel_context_window = 8192\n'
            f'[model_providers.tessera]\nname = "tessera"\nbase_url = "{url()}/v1"\n'
            'wire_api = "responses"\nrequest_max_retries = 0\nstream_max_retries = 0\n'
        )
        _turn(folder, home, "Say hi.")
        _turn(folder, home, "resume", "--last", "Say it again.")


def _turn(folder, home, *arguments):
    """Let Codex answer once, and check that its turn ends."""
    options = ["--json", "--skip-git-repo-check", "--sandbox", "read-only"]
    ended = subprocess.run(
        [sys.argv[2], "exec", *options, *arguments],
        cwd=folder,
        env={**os.environ, "CODEX_HOME": str(home)},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    events = [json.loads(line) for line in ended.stdout.splitlines() if line.startswith("{")]
    kinds = [event["type"] for event in events]
    # Codex does not limit an answer, which may fill the context.
    ended_well = "turn.completed" in kinds or "reason: max_output_tokens" in ended.stdout
    assert ended_well, (ended.stdout[-2000:], ended.stderr[-2000:])


run({"turns": turns})

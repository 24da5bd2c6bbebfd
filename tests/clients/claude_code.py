"""Claude Code: a turn on a scripted task, by Messages.

Run with the path of `claude` as second argument.
"""

import json
import os
import subprocess
import sys
import tempfile

from scenario import MODEL, run, url

PLAIN = ("--system-prompt", "Answer.", "--tools", "")


def ask(*turns):
    """Let Claude Code answer in one conversation, once with the options of each turn."""
    with tempfile.TemporaryDirectory() as folder:
        for options in turns:
            _turn(folder, *options)


def _turn(folder, *options):
    """Let Claude Code answer once, and check that its turn ends."""
    ended = subprocess.run(
        [sys.argv[2], "-p", "Say hi.", "--output-format", "json", "--max-turns", "2", *options],
        cwd=folder,
        env={
            **os.environ,
            "HOME": folder,
            "ANTHROPIC_BASE_URL": url(),
            "ANTHROPIC_API_KEY": "none",
            "ANTHROPIC_MODEL": MODEL,
            "ANTHROPIC_SMALL_FAST_MODEL": MODEL,
            "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "64",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
            "DISABLE_AUTOUPDATER": "1",
        },
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    said = ended.stdout[-2000:], ended.stderr[-2000:]
    assert ended.stdout.lstrip().startswith(("{", "[")), said
    found = json.loads(ended.stdout)
    result = found[-1] if isinstance(found, list) else found
    assert result["type"] == "result", said
    assert not result.get("api_error_status"), said
    assert result["usage"]["output_tokens"] > 0, said


run(
    {
        "without tools": lambda: ask(PLAIN),
        "with a tool": lambda: ask((*PLAIN[:3], "Read")),
        "continued": lambda: ask(PLAIN, (*PLAIN, "--continue")),
    }
)

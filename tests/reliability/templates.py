"""Renders hostile templates and checks that none takes much time or memory, and that none escapes.

    python -m tests.reliability.templates --count 10000 --seed 1

The result is JSON on standard output; the exit status is 1 if a template does what it must not.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from model.text.rendering.protocol import SECONDS
from model.text.rendering.renderer import (
    Allowance,
    Program,
    Renderers,
    RenderingUnavailableError,
    TemplateFailureError,
    TemplateInvalidError,
    TemplateLimitError,
    TemplateRefusalError,
)
from tests.reliability.hostile_templates import SECRET, TemplateWriter

MOST_BYTES = 300 << 20
MOST_SECONDS = 3.0
_VARIABLE = "TESSERA_API_KEY"
# Objects that lead to everything else, and what a file or the environment would show.
_ESCAPED = re.compile(
    rf"{SECRET}|<module '|<code object|<frame |'__builtins__': |<class 'os\.|<class 'subprocess|root:x:0|uid=\d"
)
_HOOK = "a template may not do this: "


@dataclass
class Findings:
    """What the templates did.

    Attributes:
        outcomes: how many ended in which way.
        stopped: operations that the audit hook refused, by name.
        escapes: templates that read what they must not, or whose process has a child, a file or a socket.
        slow: templates that took more processor time than `MOST_SECONDS`.
        seconds: wall-clock times of all templates.
        peak_bytes: largest resident memory of a process.
    """

    outcomes: Counter[str] = field(default_factory=Counter)
    stopped: Counter[str] = field(default_factory=Counter)
    escapes: list[str] = field(default_factory=list)
    slow: list[str] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    peak_bytes: int = 0

    @property
    def is_good(self) -> bool:
        """Whether every template stayed within its bounds."""
        return (
            not self.escapes
            and not self.slow
            and self.peak_bytes <= MOST_BYTES
            and not self.outcomes["RenderingUnavailableError"]
        )


def try_templates(sources: list[str], conversation: dict[str, object], seconds: float) -> Findings:
    """Compile and render each template as the service does, each time within these seconds of processor time."""
    findings, renderers = Findings(), Renderers()
    os.environ[_VARIABLE] = SECRET
    try:
        for source in sources:
            _try_one(renderers, source, conversation, seconds, findings)
    finally:
        del os.environ[_VARIABLE]
        renderers.end()
    # Linux counts the memory of this process, which starts them, as theirs too.
    findings.peak_bytes = resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss * 1024
    return findings


def _try_one(
    renderers: Renderers,
    source: str,
    conversation: dict[str, object],
    seconds: float,
    findings: Findings,
) -> None:
    began, used = time.monotonic(), _processor_time()
    try:
        program = Program(source, {"<|im_end|>": "\U00100000\U00100001"})
        renderers.compile(program, Allowance(seconds))
        text, outcome = renderers.render(program, conversation, Allowance(seconds)), "text"
    except (
        TemplateInvalidError, TemplateFailureError, TemplateRefusalError, TemplateLimitError, RenderingUnavailableError,
    ) as error:  # fmt: skip
        text, outcome = str(error), type(error).__name__
        if _HOOK in text:
            findings.stopped[text.partition(_HOOK)[2][:40]] += 1
        if isinstance(error, TemplateLimitError):
            outcome += f": {text}"
    seconds_passed = time.monotonic() - began
    findings.seconds.append(seconds_passed)
    findings.outcomes[outcome] += 1
    if _ESCAPED.search(text) or any(map(_has_more, renderers.pids)):
        findings.escapes.append(source)
    # That of a process is added when it ends, with what earlier templates took, but only one process computes at once.
    if min(_processor_time() - used, seconds_passed) > MOST_SECONDS:
        findings.slow.append(source)


def _processor_time() -> float:
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _has_more(pid: int) -> bool:
    """Return whether a process has a child, or an open file beyond its socket and its standard error."""
    try:
        children = Path(f"/proc/{pid}/task/{pid}/children").read_text()
        files = [str(file.readlink()) for file in Path(f"/proc/{pid}/fd").iterdir()]
    except OSError:
        return False
    return bool(children) or len(files) > 3 or any(file.startswith("/") for file in files)


def conversation() -> dict[str, object]:
    """Return the variables of each rendering: a conversation of 200 kB."""
    messages = [{"role": "user", "content": "x y " * 50_000}, {"role": "assistant", "content": "z"}]
    return {"messages": messages, "tools": None, "add_generation_prompt": True}


def main() -> None:
    """Try templates, and print what they did."""
    parser = argparse.ArgumentParser()
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--seconds", type=float, default=SECONDS)
    options = parser.parse_args()
    with tempfile.NamedTemporaryFile("w") as file:
        file.write(SECRET)
        file.flush()
        writer = TemplateWriter(options.seed, file.name)
        named = writer.named()[: options.count]
        sources = named + [writer.write() for _ in range(options.count - len(named))]
        findings = try_templates(sources, conversation(), options.seconds)
    seconds = sorted(findings.seconds)
    at = {f"p{100 * q:g}": round(seconds[int(len(seconds) * q)], 3) for q in (0.5, 0.9, 0.99)}
    result = {
        "count": len(sources), "seed": options.seed, "limit_seconds": options.seconds,
        "outcomes": findings.outcomes, "stopped_by_the_hook": findings.stopped,
        "wall_seconds": {**at, "max": round(seconds[-1], 3), "over_3": sum(s > MOST_SECONDS for s in seconds)},
        "peak_mib": round(findings.peak_bytes / 2**20, 1), "escapes": findings.escapes[:10], "slow": findings.slow[:10],
    }  # fmt: skip
    print(json.dumps(result, indent=2))
    sys.exit(not findings.is_good)


if __name__ == "__main__":
    main()

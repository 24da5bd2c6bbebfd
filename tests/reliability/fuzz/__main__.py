"""Fuzzes what takes input: HTTP, messages between processes, tokenizers, and weights with their configuration.

    python -m tests.reliability.fuzz http|protocol|tokenizer|safetensors [--minutes 30] [--seed 1] [--findings DIR]
    python -m tests.reliability.fuzz http --replay DIR/0123456789ab.case

Cases are mutations of correct inputs (`tests.reliability.fuzz`), made by a seeded generator in a child process. A
finding is an exception that is no error for the user, the end of the process, or a case that takes longer than
`--hang-seconds`. Each kind of finding is stored once: the case, and a text file with the traceback. Exits with status 1
if there are any.

The generators know the formats, instead of being guided by coverage: the parsers are compiled (httptools, msgspec,
tokenizers, safetensors), where a coverage-guided fuzzer for Python such as Atheris sees nothing.
"""

from __future__ import annotations

import argparse
import importlib
import logging
import time
from pathlib import Path
from typing import TYPE_CHECKING, cast

from tests.reliability.fuzz.runner import findings, fuzz, run_child

if TYPE_CHECKING:
    from tests.reliability.fuzz.target import Target

# A module and a class each: what a target imports must not burden the others.
TARGETS = {
    "http": ("http_target", "HTTPTarget"),
    "protocol": ("protocol_target", "ProtocolTarget"),
    "tokenizer": ("model_targets", "TokenizerTarget"),
    "safetensors": ("model_targets", "CheckpointTarget"),
}


def make_target(name: str) -> Target:
    """Build a target."""
    module, kind = TARGETS[name]
    found = importlib.import_module(f"tests.reliability.fuzz.{module}")
    return cast("Target", getattr(found, kind)())


def main() -> None:
    """Fuzz one target, or replay a case."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("target", choices=sorted(TARGETS))
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--hang-seconds", type=float, default=20.0)
    parser.add_argument("--findings", type=Path, default=Path("fuzz-findings"))
    parser.add_argument("--replay", type=Path, help="run one stored case and nothing else")
    parser.add_argument("--child", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.replay:
        make_target(options.target).check(options.replay.read_bytes())
        print("no finding")
        return
    if options.child:
        logging.getLogger("tessera").setLevel(logging.CRITICAL)
        run_child(make_target(options.target), options.child, options.seed, options.findings)
        return
    folder = options.findings / options.target
    began = time.monotonic()
    count = fuzz(options.target, 60 * options.minutes, options.seed, options.hang_seconds, folder)
    seconds = time.monotonic() - began
    found = findings(folder)
    print(f"{options.target}: {count} cases in {seconds:.0f} s, {len(found)} kinds of findings")
    for finding in found:
        print(f"  {finding.file}: {finding.kind}")
    if found:
        raise SystemExit(1)


if __name__ == "__main__":
    main()

"""Attacks a service and reports whether it keeps its promises meanwhile and afterwards.

Starts a service with the bundled model, or attacks the one at `--url`, which must not be used by anybody else. During
each attack another process requests /health every 10 ms on new connections.

    python -m tests.attacks [--id A1 A4] [--url http://127.0.0.1:8000 --api-key KEY]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import sys
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from benchmarks.report import add_bookkeeping, write_report
from tests.attacks.record import Target
from tests.attacks.registry import ATTACKS
from tests.attacks.runner import run_attack
from tests.attacks.service import attacked_service

if TYPE_CHECKING:
    from collections.abc import Iterator


@contextlib.contextmanager
def _target(options: argparse.Namespace) -> Iterator[Target]:
    if options.url is None:
        with attacked_service() as target:
            yield target
    else:
        parts = urlsplit(options.url)
        yield Target(host=parts.hostname, port=parts.port or 80, api_key=options.api_key)


def main() -> None:
    """Run the attacks and write the report; the exit status is 1 if a promise was broken."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--id", nargs="*", choices=[attack.id for attack in ATTACKS])
    parser.add_argument("--url", help="service to attack, instead of one with the bundled model")
    parser.add_argument("--api-key", help="key of that service")
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows, broken = [], 0
    with _target(options) as target:
        for attack in ATTACKS:
            if options.id and attack.id not in options.id:
                continue
            outcome = asyncio.run(run_attack(attack, target))
            faults = outcome.faults()
            broken += bool(faults)
            rows.append(dataclasses.asdict(outcome) | {"faults": "; ".join(faults)})
            print(f"{attack.id} {attack.name}: {'; '.join(faults) or 'as promised'}", flush=True)
    write_report(
        "attacks", rows, ("httptools", "uvloop"), folder=options.out, revision=options.commit
    )
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()

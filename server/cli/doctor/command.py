"""`tessera doctor`: prints one line for each check; exits with status 1 if one found an error.

Imports PyTorch, so `server.cli.command_groups` imports it only for this command.
"""

from __future__ import annotations

import json
import warnings
from typing import TYPE_CHECKING

from server.cli.doctor.checks import Check, Status, check
from server.cli.doctor.machine import inspect
from server.cli.output import write_result

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from server.cli.settings import Settings


def main(options: argparse.Namespace, settings: Settings) -> None:
    """Check this machine."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # PyTorch's, of an old driver, which is one of the checks
        checks = check(inspect(settings), settings)
    write_result(as_json(checks) if options.json else render(checks))
    if has_error(checks):
        raise SystemExit(1)


def render(checks: Sequence[Check]) -> str:
    """Format the results, one line each."""
    width = max(len(it.name) for it in checks)
    return "\n".join(
        f"{it.status.value:<7}  {it.name:<{width}}  {it.finding}{': ' * bool(it.advice)}{it.advice}"
        for it in checks
    )


def as_json(checks: Sequence[Check]) -> str:
    """Format the results as a JSON object."""
    rows = [it._asdict() | {"status": it.status.value} for it in checks]
    return json.dumps({"ok": not has_error(checks), "checks": rows}, indent=2)


def has_error(checks: Sequence[Check]) -> bool:
    """Whether a check found an error."""
    return any(it.status is Status.ERROR for it in checks)

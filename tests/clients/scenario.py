"""Runs the steps of a scenario. Scenarios run in environments of their own, so this is standard library only."""

import asyncio
import inspect
import sys
import traceback
from collections.abc import Awaitable, Callable

MODEL = "bundled"
WEATHER = {
    "type": "object",
    "properties": {"city": {"type": "string"}, "days": {"type": "integer"}},
    "required": ["city"],
    "additionalProperties": False,
}
"""Parameters of the tool `weather`."""


def run(
    steps: dict[str, Callable[[], Awaitable[object] | object]],
    *,
    tolerated: tuple[type[Exception], ...] = (),
) -> None:
    """Run steps and end the process: with 1 if one failed.

    Args:
        steps: by name; a step fails if it raises.
        tolerated: errors that say that the model wrote nonsense, which does not matter here.
    """
    failed = 0
    # One loop for all steps: clients keep connections of the first.
    loop = asyncio.new_event_loop()
    asyncio.set_event_loop(loop)
    for name, step in steps.items():
        try:
            found = step()
            if inspect.isawaitable(found):
                loop.run_until_complete(_wait(found))
        except tolerated as error:
            print(f"ok {name} ({type(error).__name__}: {str(error)[:80]!r})")
        except Exception as error:  # noqa: BLE001 - every client has errors of its own
            failed += 1
            print(f"FAILED {name}\n    ", *traceback.format_exception(error, limit=-2))
        else:
            print(f"ok {name}")
    sys.exit(failed > 0)


async def _wait(found: Awaitable[object]) -> None:
    await found


def url() -> str:
    """Return the address of the service, without a slash at its end."""
    return sys.argv[1]

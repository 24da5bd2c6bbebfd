"""Starts Ray Serve on this machine with the service, and ends it without breaking streams.

    python -m tessera.server.ray_main model=bundled device=cpu min_replicas=2

The arguments are those of `server.ray_app.build`; `host` and `port` are the proxy's. At SIGTERM or SIGINT all replicas
drain as `tessera serve` does (`drain_delay`, `drain_timeout`), and the status is 0. `serve run` breaks streams: it ends
Ray at once at SIGTERM, and the proxy before the replicas at SIGINT.

With RAY_ADDRESS it joins a cluster that runs, whose nodes need `VARIABLES` before Ray starts on them.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from ray.serve.handle import DeploymentHandle

VARIABLES: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "131072",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What Ray's processes read when they start. The third and fourth matter with prefix_routing only."""
_NAME: Final = "tessera"
_END_SECONDS: Final = 30.0


def main() -> None:
    """Serve until a signal; exits with 2 if an argument is wrong."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)  # noqa: TID251 - Ray's settings have no other form
    import ray  # noqa: PLC0415 - reads the variables when it is imported
    from pydantic import ValidationError  # noqa: PLC0415 - with what follows
    from ray import serve  # noqa: PLC0415 - the same

    from server.ray_app import build, options_of  # noqa: PLC0415 - imports Ray

    try:
        arguments = parse(sys.argv[1:])
        settings = options_of(arguments).settings
        application = build(arguments)
    except (ValueError, ValidationError) as error:
        sys.exit(_usage(error))
    stop = threading.Event()
    ray.init(namespace="serve")
    serve.start(http_options={"host": settings.host, "port": settings.port})
    # Ray's own handlers end it at once; they are there after `init`.
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    replicas = serve.run(application, name=_NAME)
    stop.wait()
    print("draining", file=sys.stderr, flush=True)  # noqa: T201 - for who watches the command
    asyncio.run(_end(replicas, settings.drain_delay + settings.drain_timeout))
    ray.shutdown()


async def _end(replicas: DeploymentHandle, seconds: float) -> None:
    """Drain all replicas, then end their engines. With `VARIABLES`, Ray's handles work on an event loop only."""
    await replicas.broadcast("drain").results_async(timeout_s=seconds + _END_SECONDS)
    await replicas.broadcast("end").results_async(timeout_s=_END_SECONDS)


def parse(words: list[str]) -> dict[str, str]:
    """Return the arguments of words such as `model=bundled`.

    Raises:
        ValueError: a word has another form.
    """
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not name=value")
    return dict(word.split("=", 1) for word in words)


def _usage(error: Exception) -> int:
    print(f"error: {error}", file=sys.stderr)  # noqa: T201 - of a command
    return 2


if __name__ == "__main__":
    main()

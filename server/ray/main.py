"""Starts Ray Serve on this machine with the service, and ends it without breaking streams.

    python -m tessera.server.ray.main model=bundled device=cpu min_replicas=2

The arguments are those of `server.ray.app.build`; `host` and `port` are the proxy's. At SIGTERM or SIGINT all replicas
drain as `tessera serve` does (`drain_delay`, `drain_timeout`), and the status is 0, or 1 if a replica was lost
meanwhile; a second signal ends them at once. `serve run` breaks streams: it ends Ray at once at SIGTERM, and the proxy
before the replicas at SIGINT.

With RAY_ADDRESS it joins a cluster that runs, whose nodes need `VARIABLES` before Ray starts on them, and removes the
application from it at the end.
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
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "131072",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What Ray's processes read when they start.

HAProxy sends a request again that a killed replica has not begun to answer, since to compute it twice does no harm. The
variables of the request router matter with prefix_routing only.
"""
_NAME: Final = "tessera"
_END_SECONDS: Final = 30.0


def main() -> None:
    """Serve until a signal; exits with 2 if an argument is wrong."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)  # noqa: TID251 - Ray's settings have no other form
    import ray  # noqa: PLC0415 - reads the variables when it is imported
    from pydantic import ValidationError  # noqa: PLC0415 - with what follows
    from ray import serve  # noqa: PLC0415 - the same

    from server.ray.app import build, options_of  # noqa: PLC0415 - imports Ray

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
    joined = "RAY_ADDRESS" in os.environ  # noqa: TID251 - the same
    problems = asyncio.run(end(replicas, settings.drain_delay + settings.drain_timeout))
    if joined:
        serve.delete(_NAME)  # otherwise the cluster would replace the replicas
    ray.shutdown()
    for problem in problems:
        print(f"error: {problem}", file=sys.stderr)  # noqa: T201 - of a command
    sys.exit(1 if problems else 0)


async def end(replicas: DeploymentHandle, seconds: float) -> list[str]:
    """Drain all replicas, then end their engines; at another signal without waiting for what still runs.

    Args:
        replicas: with `VARIABLES`, their handle works on an event loop only.
        seconds: how long they may drain.

    Returns:
        What went wrong: a replica that was lost, or that did not end in time. The others end all the same.
    """
    again = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(number, again.set)
    draining = asyncio.create_task(_of_all(replicas, "drain", seconds + _END_SECONDS))
    hurrying = asyncio.create_task(again.wait())
    await asyncio.wait((draining, hurrying), return_when=asyncio.FIRST_COMPLETED)
    hurrying.cancel()
    problems = draining.result() if draining.done() else []
    problems += await _of_all(replicas, "end", _END_SECONDS)
    draining.cancel()
    return problems


async def _of_all(replicas: DeploymentHandle, method: str, seconds: float) -> list[str]:
    """Call a method of all replicas; returns the texts of their errors."""
    calls = replicas.broadcast(method)
    try:
        results = await calls.results_async(timeout_s=seconds, return_exceptions=True)
    except TimeoutError:
        return [f"{method}: a replica did not return within {seconds:g} s"]
    return [f"{method}: {it}" for it in results if isinstance(it, BaseException)]


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

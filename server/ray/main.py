"""Starts Ray Serve on this machine with the service, and ends it without breaking streams.

    python -m tessera.server.ray.main model=bundled device=cpu min_replicas=2

The arguments are those of `server.ray.app.build`; `host` and `port` are the proxy's. At SIGTERM or SIGINT all replicas
drain as `tessera serve` does (`drain_delay`, `drain_timeout`), and the status is 0, or 1 if a replica was lost
meanwhile; a second signal ends them at once. `serve run` breaks streams: it ends Ray at once at SIGTERM, and the proxy
before the replicas at SIGINT. A signal while Ray or the replicas start ends both within seconds, with status 0. If they
cannot start, one message says why, and the status is 1; 2 if an argument is wrong.

With RAY_ADDRESS it joins a cluster that runs, whose nodes need `VARIABLES` before Ray starts on them, and removes the
application from it at the end.
"""

from __future__ import annotations

import asyncio
import contextlib
import importlib.util
import os
import re
import signal
import socket
import sys
import sysconfig
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from pydantic import ValidationError

from server.cli.listening import listen
from server.cli.peers.values import truth
from server.cli.service_parts import api_keys, warn_if_open
from server.cli.settings import CONFIG, environment_variable, read_environment
from server.engine.core.start_checks import StartupError
from server.log import configure_logging
from server.ray.haproxy import BINARY_VARIABLE, SCRIPT
from server.ray.processes import run

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from ray.serve.handle import DeploymentHandle

    from server.cli.settings import Settings

VARIABLES: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_HAPROXY_RETRY_ON": "conn-failure empty-response",
    BINARY_VARIABLE: str(Path(sysconfig.get_path("scripts"), SCRIPT)),
    "RAY_SERVE_HAPROXY_RETRIES": "20",
    "RAY_SERVE_HAPROXY_TUNE_BUFSIZE": "131072",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "131072",
    "RAY_USAGE_STATS_ENABLED": "0",
}
"""What Ray's processes read when they start.

HAProxy sends a request again that a killed replica has not started to answer, since to compute it twice does no harm.
For that it needs the whole request in a buffer (`server.ray.haproxy`). The variables of the request router matter with
prefix_routing only.
"""
_NAME: Final = "tessera"
_END_SECONDS: Final = 30.0
_CONNECT_SECONDS: Final = 10.0
_PROXY_PORTS: Final = {"RAY_SERVE_HAPROXY_STATS_PORT": 8404, "RAY_SERVE_HAPROXY_METRICS_PORT": 9101}
"""Ports of HAProxy's own pages, with the variables that change them."""
_CAUSE: Final = re.compile(
    r"^(?:[A-Za-z_]+\.)*(?:[A-Za-z_]*(?:Error|Exception)): *(\S.*)$", re.MULTILINE
)
"""The last line of a traceback, as Ray repeats it in its messages."""


def main() -> None:
    """Serve until a signal. Exits with 2 if an argument is wrong, with 1 and a message if Ray cannot start."""
    for name, value in VARIABLES.items():
        os.environ.setdefault(name, value)  # noqa: TID251 - Ray's settings have no other form
    try:
        arguments = from_environment() | parse(sys.argv[1:])
    except ValueError as error:
        sys.exit(_problem(error, 2))
    sys.exit(run(lambda started: _serve(arguments, started)))


def _serve(arguments: dict[str, str], started: Callable[[], None]) -> int:
    """Serve until a signal, and return the exit status.

    Args:
        arguments: of `build`.
        started: called when the replicas are ready and signals drain them.
    """
    _on_signals(lambda: sys.exit(0))
    if importlib.util.find_spec("ray") is None:
        return _problem("Ray Serve is not installed: pip install 'tessera[ray]'")
    import ray  # noqa: PLC0415 - reads the variables when it is imported
    from ray import serve  # noqa: PLC0415 - the same

    from server.ray.app import build, options_of  # noqa: PLC0415 - imports Ray

    try:
        settings = options_of(arguments).settings
        application = build(arguments)
    except ValidationError as error:
        # Without the values, which may be keys.
        texts = [
            ": ".join([*map(str, it["loc"][-1:]), it["msg"]])
            for it in error.errors(include_url=False, include_input=False)
        ]
        return _problem("; ".join(texts), 2)
    cluster = os.environ.get("RAY_ADDRESS", "local") or "local"  # noqa: TID251 - Ray's
    joined = cluster != "local"
    stop = threading.Event()
    with contextlib.ExitStack() as held:
        try:
            if joined:
                _check_cluster(cluster)
            else:
                _check_machine(settings)
            with _own_signals():
                ray.init(namespace="serve")
            held.callback(ray.shutdown)
            serve.start(http_options={"host": settings.host, "port": settings.port})
            if joined:  # otherwise the cluster would replace the replicas
                held.callback(serve.delete, _NAME)
            replicas = serve.run(application, name=_NAME)
        except Exception as error:  # noqa: BLE001 - of Ray, which has no common class
            reason = _of_replicas() if ray.is_initialized() else ""
            return _problem(f"Ray cannot start: {cause(RuntimeError(reason) if reason else error)}")
        _on_signals(stop.set)
        started()
        stop.wait()
        print("draining", file=sys.stderr, flush=True)  # noqa: T201 - for who watches the command
        problems = asyncio.run(end(replicas, settings.drain_delay + settings.drain_timeout))
    for problem in problems:
        _problem(problem)
    return 1 if problems else 0


def _check_machine(settings: Settings) -> None:
    """Refuse what Ray's processes would only write to their log files, and log what tessera serve logs of its address.

    Raises:
        StartupError: a port is in use, a program is missing, or the file of the API keys cannot be used.
    """
    with listen(settings.host, settings.port)[0] as listener:
        address, port = listener.getsockname()[:2]
    configure_logging(settings.log_level, settings.log_format)
    warn_if_open(settings.host, address, port, api_keys(settings))
    for variable, default in _PROXY_PORTS.items():
        number = int(os.environ.get(variable, default))  # noqa: TID251 - Ray's
        try:
            listen("0.0.0.0", number)[0].close()  # noqa: S104 - as HAProxy does
        except StartupError as error:
            raise StartupError(f"{error} ({variable} sets another port)") from None
    program = os.environ[BINARY_VARIABLE]  # noqa: TID251 - Ray's
    if not os.access(program, os.X_OK):
        raise StartupError(f"{BINARY_VARIABLE}={program} is not a program: install Tessera again")


def _check_cluster(address: str) -> None:
    """Refuse an address where nothing listens, which Ray tries for minutes. Only Ray itself finds others, as "auto".

    Raises:
        StartupError: there is no connection.
    """
    host, colon, port = address.removeprefix("ray://").rpartition(":")
    if colon and port.isdigit():
        try:
            socket.create_connection((host.strip("[]"), int(port)), _CONNECT_SECONDS).close()
        except (OSError, OverflowError) as error:
            raise StartupError(f"RAY_ADDRESS={address}: {error}") from None


def _on_signals(act: Callable[[], object]) -> None:
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: act())


@contextlib.contextmanager
def _own_signals() -> Iterator[None]:
    """Set the handlers again that Ray replaces: its own end it at once."""
    handlers = {number: signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT)}
    yield
    for number, handler in handlers.items():
        signal.signal(number, handler)


def _of_replicas() -> str:
    """Return what Ray knows about deployments that failed, with their tracebacks; empty for nothing."""
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    with contextlib.suppress(Exception):  # no more than a better message
        application = serve.status().applications[_NAME]
        return "\n".join(it.message for it in application.deployments.values() if it.message)
    return ""


def cause(error: BaseException) -> str:
    """Return one line that says why Ray could not start: the last error of the traceback in its message, if any."""
    text = str(error).strip()
    causes = _CAUSE.findall(text)
    lines = [it.strip() for it in text.splitlines() if it.strip()]
    return causes[-1] if causes else lines[0] if lines else type(error).__name__


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


def from_environment() -> dict[str, str]:
    """Return the settings that variables of the service give.

    Raises:
        ValueError: there is one of no setting, or of what this command does not read.
    """
    values, unknown = read_environment()
    if CONFIG in values:
        raise ValueError(
            f"{environment_variable(CONFIG)}: this command reads no configuration file"
        )
    if unknown and truth(values.get("ignore_unknown_env", "")) is not True:
        raise ValueError(f"no setting has the environment variable {unknown[0]}")
    return values


def parse(words: list[str]) -> dict[str, str]:
    """Return the arguments of words such as `model=bundled`.

    Raises:
        ValueError: a word has another form.
    """
    wrong = [word for word in words if "=" not in word]
    if wrong:
        raise ValueError(f"{wrong[0]!r} is not name=value")
    return dict(word.split("=", 1) for word in words)


def _problem(text: object, status: int = 1) -> int:
    """Write an error and return the exit status."""
    print(f"error: {text}", file=sys.stderr, flush=True)  # noqa: T201 - of a command
    return status


if __name__ == "__main__":
    main()

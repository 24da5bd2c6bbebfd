"""Ray Serve on this machine: deploys the service, and finds and counts its processes."""

from __future__ import annotations

import csv
import http.client
import io
import json
import os
import re
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    from collections.abc import Callable

PORT: Final = 8765
SETTINGS: Final[dict[str, Any]] = {
    "model": "bundled", "device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 20_480, "access_log": "off",
    "max_num_seqs": 32, "cpus": 0.5,
}  # fmt: skip
"""Arguments of `build` that all parts share."""
REPLICA: Final = b"ray::ServeReplica:tessera:tessera"
PROXY: Final = b"/bin/haproxy"
_ROUTER: Final = REPLICA + b"-router"
_STATISTICS_PORT: Final = 8404
_WAIT_SECONDS: Final = 600.0
_SERVE: Final = Path(sys.executable).with_name("serve")
"""Ray Serve's command."""


def deploy(rule: str, *, replicas: int | None = None, **changes: Any) -> None:  # noqa: ANN401 - arguments of `build`
    """Deploy a configuration, as `serve deploy` does, and wait until all replicas run.

    Args:
        rule: "prefix" for prefix_routing.
        replicas: their number, without replacing those that are there; None for what the arguments say.
        changes: arguments that differ.
    """
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    arguments = SETTINGS | {"min_replicas": 2, "prefix_routing": rule == "prefix"} | changes
    application: dict[str, Any] = {
        "name": "tessera", "route_prefix": "/", "import_path": "server.ray.app:build", "args": arguments,
    }  # fmt: skip
    if replicas is not None:
        application["deployments"] = [{"name": "tessera", "num_replicas": replicas}]
    config = {"http_options": {"port": PORT}, "applications": [application]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # which is YAML too
        file.flush()
        subprocess.run([_SERVE, "deploy", file.name], check=True, stdout=subprocess.DEVNULL)
    time.sleep(2)  # until the status is that of the new configuration
    until(lambda: serve.status().applications["tessera"].status == "RUNNING")


def running() -> int:
    """Return the number of replicas that answer requests."""
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    deployment = serve.status().applications["tessera"].deployments["tessera"]
    return int(deployment.replica_states.get("RUNNING", 0))


def reached_by_proxy() -> int:
    """Return the number of replicas that HAProxy sends requests to; it learns of a new one some seconds after Ray."""
    connection = http.client.HTTPConnection("127.0.0.1", _STATISTICS_PORT, timeout=30)
    connection.request("GET", "/stats;csv")
    lines = connection.getresponse().read().decode().splitlines()
    connection.close()
    servers = csv.DictReader(io.StringIO("\n".join(lines).removeprefix("# ")))
    return sum(
        it["pxname"] == "http-tessera"
        and it["svname"].startswith("SERVE_REPLICA")
        and it["status"].startswith("UP")
        for it in servers
    )


def both_replicas() -> list[int]:
    """Return the processes of two replicas, when those of earlier parts, which still drain, have ended."""
    until(lambda: len(processes(REPLICA)) == 2)
    return processes(REPLICA)


def processes(part: bytes) -> list[int]:
    """Return the ids of the processes whose command line contains a part; not the router's, whose name is longer."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        try:
            command = (entry / "cmdline").read_bytes()
        except OSError:  # it has ended
            continue
        if part in command and _ROUTER not in command and entry.name != str(os.getpid()):
            found.append(int(entry.name))
    return found


def cpu_seconds(pid: int) -> float:
    """Return the processor time that a process has used; its children's is not in it."""
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def requests_of_replicas() -> dict[str, float]:
    """Return the requests that each replica has answered, by the time at which its process started."""
    found = {}
    for _ in range(60):
        connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=30)
        connection.request("GET", "/metrics")
        text = connection.getresponse().read().decode()
        connection.close()
        started = re.search(r"^process_start_time_seconds\S* (\S+)", text, re.MULTILINE)
        answered = re.findall(r"^tgi_request_count\S* (\S+)", text, re.MULTILINE)
        if started and answered:
            found[started[1]] = sum(map(float, answered))
    return found


def until(is_true: Callable[[], object]) -> None:
    """Wait until something holds.

    Raises:
        SystemExit: it did not come to hold.
    """
    end = time.monotonic() + _WAIT_SECONDS
    while not is_true():
        if time.monotonic() > end:
            raise SystemExit(f"waited {_WAIT_SECONDS} s in vain")
        time.sleep(0.1)

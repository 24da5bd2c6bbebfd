"""Measures what one client's flood does to another: client A floods the service, client B sends a few small requests.

A keeps 150 plain, 150 grammar, 150 long-prompt and 150 slow-body requests in progress and sends the next one at once,
whatever the answer was. B sends 12 small requests one after the other, and 12 at the same time: first to the idle
service, then during the flood. All of B's must succeed, and the p99 of the time to the first token, from the start of
the connection, may be three times that of the idle service. A and B have a key each, and in a second run no key and an
address each.

    python -m tests.reliability.two_tenants [--clients 150] [--rounds 5] [--front-ends 2]
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import http.client
import json
import multiprocessing
import os
import random
import time
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

import uvloop

from benchmarks.report import add_bookkeeping, write_report
from tests.reliability.fast_client import ClientRun
from tests.reliability.managed_service import ManagedService, read_metrics

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence
    from multiprocessing.synchronize import Event as EventType

_ADDRESS_A, _ADDRESS_B = "127.0.0.2", "127.0.0.1"
_KEY_A, _KEY_B = "key-of-tenant-a", "key-of-tenant-b"
_KEYS: Final = {"key": (_KEY_A, _KEY_B), "address": ("", "")}
_NUM_REQUESTS: Final = 12
_MOST_RATIO: Final = 3.0
_TIMEOUT: Final = 120.0
_PAUSE_SECONDS: Final = 5.0
"""After the flood, until the service has ended what its clients left."""
_DISTINCT: Final = 600
"""More than the grammars and prompts that any cache keeps."""
_SLOW_BODY_BYTES: Final = 1_500_000


class Tenant(NamedTuple):
    """A client: by its key, or by its address.

    Attributes:
        address: of its connections.
        key: its API key; empty for none.
    """

    address: str
    key: str

    def head(self, path: str, length: int) -> bytes:
        """Return the head of a request with a JSON body."""
        key = f"Authorization: Bearer {self.key}\r\n" if self.key else ""
        return (
            f"POST {path} HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: application/json\r\n{key}"
            f"Content-Length: {length}\r\n\r\n"
        ).encode()

    def post(self, path: str, body: object) -> bytes:
        """Return a request."""
        data = json.dumps(body).encode()
        return self.head(path, len(data)) + data


class Sent(NamedTuple):
    """One of B's requests.

    Attributes:
        status: of the answer; 0 for none.
        ttft: seconds until the first token; infinite without one.
    """

    status: int
    ttft: float


def plain_requests(tenant: Tenant, rng: random.Random) -> list[bytes]:
    """Return requests with short prompts and long answers."""
    return [
        tenant.post("/generate", _body(f"def f{rng.randrange(10**6)}(x):\n", 256))
        for _ in range(_DISTINCT)
    ]


def grammar_requests(tenant: Tenant, rng: random.Random) -> list[bytes]:
    """Return requests with a schema that no other one has."""
    requests = []
    for _ in range(_DISTINCT):
        fields = {f"field_{rng.randrange(10**9)}": {"type": "string"} for _ in range(40)}
        schema = {"type": "object", "properties": fields, "required": list(fields)}
        body = _body("value = ", 64)
        body["parameters"]["grammar"] = {"type": "json", "value": schema}
        requests.append(tenant.post("/generate", body))
    return requests


def long_requests(tenant: Tenant, rng: random.Random) -> list[bytes]:
    """Return requests with long prompts."""
    return [
        tenant.post(
            "/generate",
            _body("\n".join(f"x{rng.randrange(10**6)} = {i}" for i in range(150)), 16),
        )
        for _ in range(_DISTINCT)
    ]


def _body(text: str, max_new_tokens: int) -> dict[str, Any]:
    return {"inputs": text, "parameters": {"max_new_tokens": max_new_tokens}}


async def send_slowly(tenant: Tenant, port: int, statuses: Counter[int]) -> None:
    """Send bodies at a byte a second, for ever."""
    head = tenant.head("/generate", _SLOW_BODY_BYTES)
    while True:
        writer = None
        try:
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(tenant.address, 0)
            )
            writer.write(head + b'{"inputs": "')
            answer = asyncio.ensure_future(reader.readline())
            while not (await asyncio.wait({answer}, timeout=1.0))[0]:
                writer.write(b"x")
            line = answer.result().split()
            statuses[int(line[1]) if len(line) > 1 else 0] += 1
        except OSError:
            statuses[0] += 1
        finally:
            if writer is not None:
                writer.transport.abort()


def flood(
    tenant: Tenant, port: int, clients: int, running: EventType, results: Any, niceness: int
) -> None:
    """Be client A until the process is ended; puts statuses by kind into `results` every second."""
    os.nice(niceness)
    uvloop.run(_flood(tenant, port, clients, running, results))


async def _flood(tenant: Tenant, port: int, clients: int, running: EventType, results: Any) -> None:
    rng = random.Random(1)
    kinds: dict[str, Callable[[Tenant, random.Random], list[bytes]]] = {
        "plain": plain_requests,
        "grammar": grammar_requests,
        "long prompt": long_requests,
    }
    runs = {
        kind: ClientRun(port, make(tenant, rng), clients, None, address=tenant.address)
        for kind, make in kinds.items()
    }
    slow: Counter[int] = Counter()
    tasks = [asyncio.ensure_future(run.run()) for run in runs.values()]
    tasks += [asyncio.ensure_future(send_slowly(tenant, port, slow)) for _ in range(clients)]
    while True:
        await asyncio.sleep(1.0)
        running.set()
        statuses = {kind: run.statuses for kind, run in runs.items()} | {"slow body": dict(slow)}
        results["statuses"] = {
            kind: {str(status): count for status, count in sorted(counts.items())}
            for kind, counts in statuses.items()
        }


async def send(tenant: Tenant, port: int, number: int) -> Sent:
    """Send one of B's requests; the time begins with its connection."""
    body = _body(f"def add_{number}(a, b):\n", 8)
    began = time.perf_counter()
    writer = None
    try:
        async with asyncio.timeout(_TIMEOUT):
            reader, writer = await asyncio.open_connection(
                "127.0.0.1", port, local_addr=(tenant.address, 0)
            )
            writer.write(tenant.post("/generate_stream", body))
            line = await reader.readline()
            status = int(line.split()[1])
            while not (line := await reader.readline()).startswith(b"data:"):
                if not line:
                    return Sent(status, float("inf"))
            ttft = time.perf_counter() - began
            while b'"generated_text":"' not in line:
                if not line or b'"error"' in line:
                    return Sent(-1, float("inf"))
                line = await reader.readline()
            return Sent(status, ttft)
    except (OSError, TimeoutError, IndexError):
        return Sent(0, float("inf"))
    finally:
        if writer is not None:
            writer.transport.abort()


async def send_all(tenant: Tenant, port: int, rounds: int) -> dict[str, list[Sent]]:
    """Send B's requests: some one after the other, and as many at the same time."""
    numbers = iter(range(10**6))
    found: dict[str, list[Sent]] = {"one after the other": [], "at the same time": []}
    for _ in range(rounds):
        for _ in range(_NUM_REQUESTS):
            found["one after the other"].append(await send(tenant, port, next(numbers)))
        together = [send(tenant, port, next(numbers)) for _ in range(_NUM_REQUESTS)]
        found["at the same time"] += await asyncio.gather(*together)
    return found


def percentile(values: Sequence[float], share: float) -> float:
    """Return the smallest value that a share of the values does not exceed."""
    ordered = sorted(values)
    return ordered[max(0, min(len(ordered) - 1, -int(-share * len(ordered) // 1) - 1))]


@contextlib.contextmanager
def flooding(service: ManagedService, tenant: Tenant, options: argparse.Namespace) -> Iterator[Any]:
    """Be client A in another process meanwhile; yields what becomes its statuses by kind."""
    context = multiprocessing.get_context("spawn")
    running = context.Event()
    with context.Manager() as manager:
        results = manager.dict()
        process = context.Process(
            target=flood,
            args=(tenant, service.port, options.clients, running, results, options.flood_niceness),
        )
        process.start()
        try:
            assert running.wait(_TIMEOUT), "the flood does not begin"
            time.sleep(options.flood_seconds)
            yield results
        finally:
            process.kill()
            process.join()
    time.sleep(_PAUSE_SECONDS)


class Throughput:
    """Counts the tokens of prompts and outputs that the service computes."""

    def __init__(self, port: int, tenant: Tenant) -> None:
        self._port, self._tenant = port, tenant
        self._tokens, self._began = self._read(), time.monotonic()

    def _read(self) -> float:
        headers = {"Authorization": f"Bearer {self._tenant.key}"} if self._tenant.key else {}
        connection = http.client.HTTPConnection("127.0.0.1", self._port, timeout=_TIMEOUT)
        with contextlib.closing(connection):
            connection.request("GET", "/metrics", headers=headers)
            values = read_metrics(connection.getresponse().read().decode())
        return sum(values[f"tessera_{kind}_tokens_total"] for kind in ("prompt", "generation"))

    def per_second(self) -> float:
        """Return the tokens per second since this object was made."""
        return (self._read() - self._tokens) / (time.monotonic() - self._began)


def measure(service: ManagedService, a: Tenant, b: Tenant, options: argparse.Namespace) -> Any:
    """Return the rows of a run, one for each way in which B sends.

    First A is alone, then B without A, before and after the rounds with both.
    """
    with flooding(service, a, options):
        throughput = Throughput(service.port, b)
        time.sleep(options.flood_seconds)
        tokens_alone = throughput.per_second()
    asyncio.run(send_all(b, service.port, 1))  # warms up
    halves = [options.rounds - options.rounds // 2, options.rounds // 2]
    loads = [os.getloadavg()[0]]
    idle = asyncio.run(send_all(b, service.port, halves[0]))
    with flooding(service, a, options) as results:
        loads.append(os.getloadavg()[0])
        throughput = Throughput(service.port, b)
        flooded = asyncio.run(send_all(b, service.port, options.rounds))
        time.sleep(options.flood_seconds)
        tokens_together = throughput.per_second()
        statuses = dict(results["statuses"])
    loads.append(os.getloadavg()[0])
    for way, sent in asyncio.run(send_all(b, service.port, halves[1])).items():
        idle[way] += sent
    rows = []
    for way, sent in flooded.items():
        before, during = ([it.ttft for it in group] for group in (idle[way], sent))
        ratio = percentile(during, 0.99) / percentile(before, 0.99)
        rows.append(
            {
                "clients": "by key" if a.key else "by address",
                "way": way,
                "requests": len(sent),
                "statuses": {str(k): n for k, n in sorted(Counter(i.status for i in sent).items())},
                **{
                    f"{name}_ttft_p{round(100 * share)}_ms": round(
                        1000 * percentile(part, share), 1
                    )
                    for name, part in (("idle", before), ("flooded", during))
                    for share in (0.5, 0.9, 0.99)
                },
                "ttft_p99_ratio": round(ratio, 2),
                "flood": statuses,
                "tokens_per_second_of_a_alone": round(tokens_alone),
                "tokens_per_second_of_both": round(tokens_together),
                "load_average": [round(load, 1) for load in loads],
                "holds": all(it.status == 200 for it in sent) and ratio <= _MOST_RATIO,
            }
        )
    return rows


def run(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure with keys and with addresses."""
    rows = []
    for keys in [_KEYS[name] for name in options.tenants]:
        settings = [f"--frontends={options.front_ends}", *options.serve]
        settings += [f"--api-key={','.join(keys)}"] if keys[0] else []
        service = ManagedService(settings)
        with contextlib.closing(service):
            service.start()
            service.wait_until_ready()
            a, b = Tenant(_ADDRESS_A, keys[0]), Tenant(_ADDRESS_B, keys[1])
            if keys[0]:  # the address must not matter
                a = a._replace(address=_ADDRESS_B)
            rows += measure(service, a, b, options)
            service.stop()
    return rows


def main() -> None:
    """Measure, write the report, and exit with status 1 if something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--clients", type=int, default=150, help="of A, of each kind")
    parser.add_argument("--rounds", type=int, default=5, help="of B's requests")
    parser.add_argument("--flood-seconds", type=float, default=10.0, help="before B begins")
    parser.add_argument("--niceness", type=int, default=0, help="added to that of all processes")
    parser.add_argument("--flood-niceness", type=int, default=10, help="added to that of A's")
    parser.add_argument("--tenants", nargs="+", choices=list(_KEYS), default=list(_KEYS))
    parser.add_argument("--front-ends", type=int, default=1)
    parser.add_argument("--serve", nargs="*", default=[], help="further options of the service")
    add_bookkeeping(parser)
    options = parser.parse_args()
    os.nice(options.niceness)
    rows = run(options)
    write_report(
        "two-tenants", rows, ("torch",), device="cpu", folder=options.out, revision=options.commit
    )
    raise SystemExit(not all(row["holds"] for row in rows))


if __name__ == "__main__":
    main()

"""Checks that drafts change no byte of a reply: requests of every kind, with drafts and without, over HTTP.

Each request is sent to a service without drafts, then twice with them: to one company with the service's own drafts,
and to another one with random drafts, right, wrong, partly right and with end tokens in them. A company is a service
whose cache, steps or prefix cache are such that sequences are preempted, prompts divided into chunks or prefixes found,
and a number of requests at the same time. The second time, the earlier answers are known to the drafter.

    python -m tests.reliability.same_bytes [--count 2000] [--seed 0] [--quantization int8] [--kv-cache-dtype auto]

Options after `--` are those of `tessera serve`. The exit status is 1 if a reply differs or failed, or if no
draft was kept.
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import random
import sys
from collections import Counter
from typing import TYPE_CHECKING, Any, Final, NamedTuple

from benchmarks.report import add_bookkeeping, write_report
from tests.reliability.draft_requests import Request, RequestMaker, differing_places
from tests.reliability.exchange import HOST, Reply, Truncated, encode_post, read_reply
from tests.reliability.managed_service import ManagedService

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

OWN: Final = ("-m", "server.cli.main", "serve")
RANDOM: Final = ("-m", "tests.reliability.random_drafts_service")
_TIMEOUT: Final = 600.0
_REFUSED: Final = 429
_RETRY_SECONDS: Final = 0.1
_DRAFTS: Final = (None, None, 1, 2, 4, 7)
"""Most tokens of a request's drafts."""
_COUNTERS: Final = {
    "drafted": "tessera_draft_tokens_total",
    "accepted": "tessera_draft_accepted_tokens_total",
    "preemptions": "tessera_preemptions_total",
    "cached": "tessera_prefix_cache_hit_tokens_total",
}


class Company(NamedTuple):
    """What computes requests beside each other.

    Attributes:
        name: what is special about it.
        program: arguments of Python that run the service.
        options: of `tessera serve`.
        concurrency: numbers of requests at the same time; one of them for each part of the requests.
    """

    name: str
    program: Sequence[str]
    options: Sequence[str]
    concurrency: Sequence[int]


COMPANIES: Final = (
    Company("own drafts, alone", OWN, (), (1,)),
    Company("own drafts, few", OWN, (), (2, 4, 8)),
    Company("random drafts, alone", RANDOM, (), (1,)),
    Company(
        "random drafts, chunks",
        RANDOM,
        ("--max-num-batched-tokens=64", "--max-num-seqs=24"),
        (8, 32),
    ),
    Company(
        "random drafts, small cache",
        RANDOM,
        ("--kv-cache-tokens=1024", "--max-model-len=1024", "--block-size=4", "--max-num-seqs=32"),
        (16, 64),
    ),
    Company(
        "random drafts, no prefix cache, short blocks",
        RANDOM,
        ("--enable-prefix-caching=false", "--block-size=4"),
        (3, 64),
    ),
)


async def send_all(port: int, requests: Sequence[Request], streams: int) -> list[Reply]:
    """Send requests, so many at the same time, each on another connection; return the replies.

    A reply that did not come has the status 0.
    """
    replies = [Reply(0, {}, b"")] * len(requests)
    waiting = iter(enumerate(requests))

    async def work() -> None:
        for i, request in waiting:
            replies[i] = await _send(port, request)
            while replies[i].status == _REFUSED:  # by a small cache, if it would wait too long
                await asyncio.sleep(_RETRY_SECONDS)
                replies[i] = await _send(port, request)

    await asyncio.gather(*(work() for _ in range(streams)))
    return replies


async def _send(port: int, request: Request) -> Reply:
    reader, writer = await asyncio.open_connection(HOST, port)
    try:
        async with asyncio.timeout(_TIMEOUT):
            writer.write(encode_post(request.path, request.body, close=True))
            return await read_reply(reader)
    except (TimeoutError, OSError, Truncated) as error:
        return Reply(0, {}, repr(error).encode())
    finally:
        writer.transport.abort()


def counters(service: ManagedService) -> dict[str, int]:
    """Return the counters of `_COUNTERS`."""
    values = service.metrics()
    return {key: int(values[name]) for key, name in _COUNTERS.items()}


@contextlib.contextmanager
def running(company: Company, options: Sequence[str]) -> Iterator[ManagedService]:
    """Run the service of a company."""
    service = ManagedService([*options, *company.options], program=company.program)
    with contextlib.closing(service):
        service.start()
        service.wait_until_ready()
        yield service
        service.stop()


def check(
    company: Company, requests: Sequence[Request], options: Sequence[str], rng: random.Random
) -> dict[str, Any]:
    """Send requests to the service of a company, without drafts and twice with them; return a row of the report."""
    row: dict[str, Any] = {"company": company.name, "requests": len(requests)}
    different, statuses = [], Counter[int]()
    with running(company, options) as service:
        without = [it.with_drafts(0) for it in requests]
        streams = rng.choice(company.concurrency)
        expected = asyncio.run(send_all(service.port, without, streams))
        assert not counters(service)["drafted"], "requests that want no drafts had some"
        row["concurrency"] = [streams]
        for _ in range(2):
            streams = rng.choice(company.concurrency)
            row["concurrency"].append(streams)
            order = rng.sample(range(len(requests)), len(requests))
            sent = [requests[i].with_drafts(rng.choice(_DRAFTS)) for i in order]
            replies = asyncio.run(send_all(service.port, sent, streams))
            for i, request, reply in zip(order, sent, replies, strict=True):
                statuses[reply.status] += 1
                places = differing_places(expected[i], reply)
                if reply.status != 200 or places:
                    different.append(
                        {
                            "places": places,
                            "path": request.path,
                            "body": request.body,
                            "statuses": [expected[i].status, reply.status],
                            "without": expected[i].body.decode(errors="replace"),
                            "with": reply.body.decode(errors="replace"),
                        }
                    )
        row |= counters(service)
    row["statuses"] = {str(status): count for status, count in sorted(statuses.items())}
    return row | {"num_different": len(different), "different": different[:20]}


def run(count: int, seed: int, options: Sequence[str], named: str = "") -> list[dict[str, Any]]:
    """Check requests of every kind, each in one company with the service's own drafts and one with random ones.

    Args:
        count: requests.
        seed: of the requests and of the companies.
        options: of `tessera serve`.
        named: only companies with this text in their names.
    """
    rng = random.Random(seed)
    maker = RequestMaker(seed)
    requests = [maker.make() for _ in range(count)]
    rows = []
    for program in (OWN, RANDOM):
        companies = [it for it in COMPANIES if it.program is program]
        for number, company in enumerate(companies):
            part = requests[number :: len(companies)]
            if part and named in company.name:
                rows.append(check(company, part, options, rng))
                shown = {name: it for name, it in rows[-1].items() if name != "different"}
                print("  ".join(f"{key}={value}" for key, value in shown.items()), flush=True)
    return rows


def main() -> None:
    """Check, write the report, and exit with status 1 if something does not hold."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=int, default=2000, help="requests (%(default)s)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--companies", help="only those with this text in their names")
    parser.add_argument("--quantization", default="auto", help="of `tessera serve`")
    parser.add_argument("--kv-cache-dtype", default="auto", help="of `tessera serve`")
    parser.add_argument("--deterministic", action="store_true", help="of `tessera serve`")
    parser.add_argument("served", nargs="*", help="further options of `tessera serve`, after --")
    add_bookkeeping(parser)
    options = parser.parse_args()
    served = [
        f"--quantization={options.quantization}",
        f"--kv-cache-dtype={options.kv_cache_dtype}",
    ]
    served += ["--deterministic"] * options.deterministic + options.served
    rows = run(options.count, options.seed, served, options.companies or "")
    on_gpu = any("cuda" in it for it in options.served)
    write_report(
        "same-bytes",
        rows,
        device="cuda" if on_gpu else "cpu",
        folder=options.out,
        revision=options.commit,
        echo=False,
        extra={"served": served},
    )
    if sum(row["num_different"] for row in rows):
        sys.exit("replies differ with drafts and without")
    if not sum(row["accepted"] for row in rows):
        sys.exit("no drafted token was kept, so nothing was checked")


if __name__ == "__main__":
    main()

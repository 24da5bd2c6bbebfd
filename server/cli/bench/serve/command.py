"""`tessera bench serve`: loads a server over HTTP and reports latencies, rates and errors.

Works with Tessera, Text Generation Inference and any server with OpenAI's completions. Imports no PyTorch.
"""

from __future__ import annotations

import asyncio
import dataclasses
import sys
import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from model.errors import ModelError
from model.hub.resolve import resolve
from model.progress import Progress
from model.text.tokenizer import Tokenizer
from server.cli.bench import result
from server.cli.bench.serve.apis import APIS, Options
from server.cli.bench.serve.load import Job, Outcome, Share, run_here, run_processes
from server.cli.bench.serve.metrics import RequestRecord, Summary, summarize
from server.cli.bench.serve.prompts import (
    Prompt,
    PromptError,
    PromptMaker,
    approximate_prompts,
    with_server,
    with_tokenizer,
)
from server.cli.bench.serve.server_facts import ServerFacts, ask
from server.cli.bench.serve.table import render
from server.cli.bench.workload import arrivals, share
from server.cli.client.http_client import Client, RequestError, Target
from server.log import configure_logging
from server.version import version

if TYPE_CHECKING:
    import argparse
    from collections.abc import Sequence

    from numpy.random import Generator

_RETRY_SECONDS = 0.2
_WARM_UP_AT_RATE = 8
_PROMPTS_PER_STREAM = 4
_LEAST_PROMPTS = 16


class BenchError(Exception):
    """Nothing was measured."""


@dataclass(frozen=True, slots=True)
class Run:
    """One load on the server.

    Attributes:
        streams: concurrent requests; None if requests arrive at a rate.
        warm_up: number of requests at the beginning that do not count.
        input_lengths: tokens of each prompt.
        output_lengths: tokens to generate for each.
        times: arrival of each request that counts, seconds; None if `streams` is set.
    """

    streams: int | None
    warm_up: int
    input_lengths: list[int]
    output_lengths: list[int]
    times: list[float] | None


def main(options: argparse.Namespace, arguments: Sequence[str]) -> None:
    """Measure, print and write the result; exits with status 1 if nothing was measured."""
    configure_logging("info")  # for the download of a tokenizer
    try:
        facts, rows, runs = measure(options)
    except (BenchError, PromptError, ModelError, RequestError) as error:
        print(f"tessera bench serve: error: {error}", file=sys.stderr)
        raise SystemExit(1) from None
    if options.json is not None:
        record = result.record(
            "http",
            rows,
            machine=facts.machine,
            versions={"tessera": version()} | facts.versions,
            command=result.shown_command(["tessera", "bench", "serve"], arguments),
            commit=options.commit,
            extra={"server": facts.name, "client": result.processor_name(), "runs": runs},
        )
        print(result.write(record, options.json, facts.kind))
    if not all(run["completed"] for run in runs):
        raise SystemExit(1)


def measure(
    options: argparse.Namespace,
) -> tuple[ServerFacts, list[dict[str, Any]], list[dict[str, Any]]]:
    """Run the load, once for each concurrency.

    Returns:
        The server's description, the rows of the result, and all figures of each run.

    Raises:
        BenchError: the server does not respond, or every request of the warm-up failed.
        PromptError: no prompts can be made.
        ModelError: --tokenizer cannot be read.
    """
    generator = np.random.default_rng(options.seed)
    wanted = [
        plan_run(options, streams, generator)
        for streams in ([None] if options.rate else options.concurrency)
    ]
    facts, prompts = asyncio.run(_prepare(options, wanted, generator))
    label = options.label or result.model_label(facts.model)
    rows: list[dict[str, Any]] = []
    runs: list[dict[str, Any]] = []
    for run in wanted:
        mine, prompts = prompts[: len(run.input_lengths)], prompts[len(run.input_lengths) :]
        outcomes = _load(options, run, mine, facts.model)
        records = [record for outcome in outcomes for record in outcome.records]
        summary = summarize(records, options.goodput, planned=run.times is not None)
        busy = [round(outcome.busy, 3) for outcome in outcomes]
        print(render(summary, _describe(options, run), busy), flush=True)
        rows += result_rows(summary, options, run, label)
        runs.append(
            {"concurrency": run.streams, "rate": options.rate, "client_busy": busy}
            | {"inexact_prompts": sum(not prompt.exact for prompt in mine)}
            | dataclasses.asdict(summary)
        )
    return facts, rows, runs


def plan_run(options: argparse.Namespace, streams: int | None, generator: Generator) -> Run:
    """Choose random lengths and arrivals of one run.

    Args:
        options: of the command.
        streams: concurrent requests; None for arrivals at `options.rate`.
        generator: source of randomness.
    """
    count = options.prompts or max(_LEAST_PROMPTS, _PROMPTS_PER_STREAM * (streams or 0))
    warm_up = options.warm_up
    if warm_up is None:
        warm_up = _WARM_UP_AT_RATE if streams is None else streams
    return Run(
        streams,
        warm_up,
        options.input_len.sample(warm_up + count, generator),
        options.output_len.sample(warm_up + count, generator),
        arrivals(count, options.rate, options.burstiness, generator) if streams is None else None,
    )


def result_rows(
    summary: Summary, options: argparse.Namespace, run: Run, label: str
) -> list[dict[str, Any]]:
    """Return the rows of a run, without metrics that it does not have."""
    values: dict[str, float | None] = {
        "http_tok_s": summary.output_tokens_per_second if summary.completed else None,
        "requests_s": summary.requests_per_second if summary.completed else None,
        "goodput_s": summary.goodput,
    }
    for name, figures in (
        ("ttft", summary.ttft_ms), ("tpot", summary.tpot_ms), ("itl", summary.itl_ms), ("e2e", summary.e2e_ms),
    ):  # fmt: skip
        values[f"{name}_ms"] = None if figures is None else figures.mean
        values[f"{name}_p99_ms"] = None if figures is None else figures.percentiles[99]
    common = {
        "prompt_tokens": str(options.input_len),
        "output_tokens": str(options.output_len),
        "rate": options.rate,
        "failed": summary.failed,
    }
    return [
        {"model": label, "metric": metric, "batch": run.streams, "value": result.number(value)}
        | {"roofline": None}
        | common
        for metric, value in values.items()
        if value is not None
    ]


async def _prepare(
    options: argparse.Namespace, runs: list[Run], generator: Generator
) -> tuple[ServerFacts, list[Prompt]]:
    """Wait for the server, ask for its description, and make the prompts of all runs."""
    client = Client(Target.from_url(options.url, tuple(options.header)))
    try:
        facts = await _ask_patiently(client, options)
        lengths = [length for run in runs for length in run.input_lengths]
        if options.tokenizer is not None:
            tokenizer = Tokenizer.from_folder(resolve(options.tokenizer))
            maker = PromptMaker(with_tokenizer(tokenizer), generator)
        elif options.api == "tgi":
            maker = PromptMaker(with_server(client), generator)
        else:
            _say("no --tokenizer: the lengths of the prompts are approximate")
            return facts, approximate_prompts(lengths, generator)
        _say(f"making {len(lengths)} prompts")
        await maker.learn()
        prompts = await maker.make(lengths)
        if inexact := sum(not prompt.exact for prompt in prompts):
            _say(f"{inexact} prompts are not exactly as long as asked for")
    finally:
        client.close()
    return facts, prompts


async def _ask_patiently(client: Client, options: argparse.Namespace) -> ServerFacts:
    deadline = time.monotonic() + options.wait
    while True:
        try:
            return await ask(client, options.api, options.model)
        except RequestError as error:
            if time.monotonic() >= deadline:
                raise BenchError(f"{options.url}: {error}") from error
        await asyncio.sleep(_RETRY_SECONDS)


def _load(
    options: argparse.Namespace, run: Run, prompts: list[Prompt], model: str
) -> list[Outcome]:
    """Send a run's requests, from at most as many processes as there are streams."""
    api = APIS[options.api]()
    common = Options(model, options.ignore_eos, options.temperature)
    jobs = [
        Job(api.body(prompt.text, length, common), length, prompt.tokens)
        for prompt, length in zip(prompts, run.output_lengths, strict=True)
    ]
    warm_up, jobs = jobs[: run.warm_up], jobs[run.warm_up :]
    if run.times is not None:
        for job, when in zip(jobs, run.times, strict=True):
            job.arrival = when
    processes = min(options.processes, run.streams or len(jobs))
    streams = share(run.streams or max(processes, len(warm_up)), processes)
    shares = [
        Share(options.url, options.header, options.api, jobs[i::processes], warm_up[i::processes],
              streams[i], options.timeout)
        for i in range(processes)
    ]  # fmt: skip

    what = _describe(options, run)
    shown = Progress(f"{what}: warm-up", _say, len(warm_up), "requests")

    def when_warm(records: list[RequestRecord]) -> float:
        nonlocal shown
        failed = [record for record in records if record.error is not None]
        if failed and len(failed) == len(records):
            raise BenchError(
                f"every request of the warm-up failed: {failed[0].error}: {failed[0].detail}"
            )
        shown.close()
        _say(f"{what}: warm, sending {len(jobs)} requests")
        shown = Progress(what, _say, len(jobs), "requests")
        return time.perf_counter()

    def progress(ended: int) -> None:
        shown.update(ended)

    try:
        if processes == 1:
            return run_here(shares[0], when_warm, progress)
        return run_processes(shares, when_warm, progress)
    finally:
        shown.close()


def _say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def _describe(options: argparse.Namespace, run: Run) -> str:
    load = f"{run.streams} streams" if run.streams else f"{options.rate:g} requests/s"
    return f"{load}, {options.input_len} in, {options.output_len} out"

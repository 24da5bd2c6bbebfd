"""Measures an engine whose requests have more adapters than fit on the device, beside one whose adapters all do.

The engine runs in this process; each of the streams sends its next request when it has the reply to the last. Adapters
have random matrices for all linear layers of the model. The loads:

    resident    as many adapters as slots
    window      each adapter is that of so many requests in sequence as there are streams for a slot, then the next one
    distinct    each request has the next adapter: more are asked for at a time than there are slots, so requests wait
    model       no adapter

A gap is the time between two tokens of one stream, and has the prompts of other streams in it. All loads are measured
in turns, and the figures are those of all rounds together. The times of a single adapter are the medians of
`--samples`: read from a file that the operating system has to fetch from the disk or has in memory, and written from
memory to a slot.

With `--decode` it measures the time of a decode step instead: of sequences without adapters where the service has none
(disabled) and where it has (model), of one adapter for all (one), and of an adapter for each, up to the slots (each).
All sequences begin at once; the time is the median between two tokens of a sequence.

    python -m benchmarks.adapters [--adapters 1000] [--slots 16] [--streams 32]
    python -m benchmarks.adapters --decode 1 64 --slots 64 --adapters 64 --device cuda --dummy --model FOLDER
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import random
import statistics
import tempfile
import time
from collections import defaultdict
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

import numpy as np

from benchmarks.local_engine import LocalEngine
from benchmarks.report import add_bookkeeping, write_report
from model.adapters.adapter import AdapterReader
from model.adapters.config import CONFIG
from model.adapters.file import WEIGHTS
from model.adapters.targets import find_targets
from model.checkpoint.config import ModelConfig
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import AdapterRef, GenerateRequest
from server.engine.runner.step.adapters import SlotLoader

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine.core.engine import Engine

_BLOCK_SIZE: Final = 16
_GPU_BLOCK_SIZE: Final = 64
_ITEM_BYTES: Final = 2


def write_adapters(
    model: ModelConfig, folder: Path, count: int, rank: int, seed: int = 0
) -> list[AdapterRef]:
    """Write adapters in float16 for all linear layers of a model, the same random numbers shifted; return them."""
    shapes = {}
    for name, target in find_targets(model).items():
        shapes[f"base_model.model.{name}.lora_A.weight"] = (rank, target.inputs)
        shapes[f"base_model.model.{name}.lora_B.weight"] = (target.outputs, rank)
    header, end = {}, 0
    for name, (rows, columns) in shapes.items():
        stop = end + rows * columns * _ITEM_BYTES
        header[name] = {"dtype": "F16", "shape": [rows, columns], "data_offsets": [end, stop]}
        end = stop
    encoded = json.dumps(header).encode()
    config = {"peft_type": "LORA", "task_type": "CAUSAL_LM", "r": rank, "lora_alpha": rank}
    reader, found = AdapterReader(model, rank), []
    values = (
        np.random.default_rng(seed).standard_normal(end // _ITEM_BYTES, dtype=np.float32) * 0.01
    )
    halves = values.astype("<f2")
    for number in range(count):
        path = folder / str(number)
        path.mkdir()
        (path / CONFIG).write_text(json.dumps(config))
        shifted = np.roll(halves, number)
        content = len(encoded).to_bytes(8, "little") + encoded + shifted.tobytes()
        with (path / WEIGHTS).open("wb") as file:
            file.write(content)
            os.fsync(file.fileno())
        found.append(AdapterRef(str(number), str(path), reader.read(path).digest))
    return found


def drop_cached(adapter: AdapterRef) -> None:
    """Make the operating system fetch the files of an adapter from the disk when they are read again."""
    for name in (CONFIG, WEIGHTS):
        descriptor = os.open(Path(adapter.path) / name, os.O_RDONLY)
        os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
        os.close(descriptor)


class Streams:
    """Streams of requests to an engine in this process, with the times of their tokens.

    Args:
        local: the engine.
        options: of the command.
    """

    def __init__(self, local: LocalEngine, options: argparse.Namespace) -> None:
        self._local, self._options = local, options
        self._numbers = itertools.count(1)
        self._rng = random.Random(1)
        self._vocab = local.engine.info.vocab_size

    def run(self, adapters: Iterator[AdapterRef | None], count: int) -> dict[str, Any]:
        """Answer a number of requests.

        Args:
            adapters: of the requests.
            count: of the requests.

        Returns:
            The times to the first tokens and the gaps in seconds, and those of the whole.
        """
        channel, engine = self._local.channel, self._local.engine
        first: list[float] = []
        gaps: list[float] = []
        sent: dict[int, float] = {}
        newest: dict[int, float] = {}

        def send() -> None:
            number = next(self._numbers)
            ids = [self._rng.randrange(self._vocab) for _ in range(self._options.prompt_tokens)]
            sampling = SamplingParams(max_new_tokens=self._options.output_tokens)
            request = GenerateRequest(
                request_id=number, prompt_token_ids=ids, sampling=sampling, adapter=next(adapters)
            )
            channel.inbox.append(request)
            sent[number] = time.perf_counter()

        channel.steps.clear()
        before, start = engine.stats(), time.perf_counter()
        processor = time.process_time()
        for _ in range(min(self._options.streams, count)):
            send()
        num_sent, num_ended = len(sent), 0
        while num_ended < count:
            if channel.inbox:
                engine.receive(wait=0)
            engine.step()
            now = time.perf_counter()
            for step in channel.steps:
                for number, reason in zip(step.request_ids, step.finish_reasons, strict=True):
                    if number not in newest:
                        first.append(now - sent[number])
                    else:
                        gaps.append(now - newest[number])
                    newest[number] = now
                    if reason:
                        num_ended += 1
                        if num_sent < count:
                            send()
                            num_sent += 1
            channel.steps.clear()
        while engine.has_work:
            engine.step()
        after = engine.stats()
        return {
            "first": first,
            "gaps": gaps,
            "seconds": time.perf_counter() - start,
            "processor": time.process_time() - processor,
            "reads": after.num_adapter_reads - before.num_adapter_reads,
            "loads": after.num_adapter_loads - before.num_adapter_loads,
        }


def loads(
    adapters: list[AdapterRef], options: argparse.Namespace
) -> dict[str, Iterator[AdapterRef | None]]:
    """Return the adapters of successive requests, by the name of the load; they go on where a round has ended."""
    each = max(1, options.streams // options.slots)
    window = (it for it in itertools.cycle(adapters) for _ in range(each))
    return {
        "model": itertools.repeat(None),
        "resident": itertools.cycle(adapters[: options.slots]),
        "window": window,
        "distinct": itertools.cycle(adapters),
    }


def summary(name: str, host: int, runs: list[dict[str, Any]]) -> dict[str, Any]:
    """Return a record of all rounds of a load."""
    joined: dict[str, list[float]] = defaultdict(list)
    for run in runs:
        for key, values in run.items():
            joined[key] += values if isinstance(values, list) else [values]
    first, gaps = joined["first"], joined["gaps"]
    num_tokens = len(first) + len(gaps)
    return {
        "load": name,
        "adapters_in_host_memory": host,
        "requests": len(first),
        "first_token_ms_p50": _ms(np.percentile(first, 50)),
        "first_token_ms_p99": _ms(np.percentile(first, 99)),
        "gap_ms_p50": _ms(np.percentile(gaps, 50)),
        "gap_ms_p99": _ms(np.percentile(gaps, 99)),
        "gap_ms_p999": _ms(np.percentile(gaps, 99.9)),
        "gap_ms_longest": _ms(max(gaps)),
        "tokens_per_second": round(num_tokens / sum(joined["seconds"]), 1),
        "cpu_ms_per_token": _ms(sum(joined["processor"]) / num_tokens),
        "machine_load": round(os.getloadavg()[0], 1),
        "reads": int(sum(joined["reads"])),
        "loads": int(sum(joined["loads"])),
    }


def single(engine: Engine, adapters: list[AdapterRef], samples: int) -> list[dict[str, Any]]:
    """Return the times to read an adapter and to write it to a slot."""
    assert engine._adapters is not None  # noqa: SLF001 - no request measures a read alone
    loader = engine._adapters._loader  # noqa: SLF001 - likewise
    assert isinstance(loader, SlotLoader)
    chosen = adapters[-samples:]
    contents = []

    def read(adapter: AdapterRef) -> None:
        contents.append(loader.read(adapter).result())

    def median(prepare: Callable[[AdapterRef], None], act: Callable[[AdapterRef], None]) -> float:
        seconds = []
        for it in chosen:
            prepare(it)
            start = time.perf_counter()
            act(it)
            seconds.append(time.perf_counter() - start)
        return _ms(statistics.median(seconds))

    contents.clear()
    times = {
        "read_from_disk_ms": median(drop_cached, read),
        "read_from_page_cache_ms": median(lambda _: None, read),
    }
    written = iter(contents)
    times["write_to_slot_ms"] = median(lambda _: None, lambda _: loader.write(0, next(written)))
    num_bytes = sum(it.nbytes for update in contents[0].values() for it in update)
    return [{"load": "single", "bytes": num_bytes, "samples": samples, **times}]


def _ms(seconds: float) -> float:
    return round(1000 * float(seconds), 3)


def main() -> None:
    """Measure and write the report."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default=BUNDLED)
    parser.add_argument("--adapters", type=int, default=1000)
    parser.add_argument("--rank", type=int, default=16)
    parser.add_argument("--slots", type=int, default=16)
    parser.add_argument("--host", type=int, nargs="+", help="adapters in host memory", default=[64])
    parser.add_argument("--streams", type=int, default=32)
    parser.add_argument("--prompt-tokens", type=int, default=32)
    parser.add_argument("--output-tokens", type=int, default=32)
    parser.add_argument("--requests", type=int, default=500, help="of each load in a round")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--samples", type=int, default=50)
    parser.add_argument("--decode", type=int, nargs="+", help="sequences of a decode step")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--dummy", action="store_true", help="random weights of the model's shape")
    parser.add_argument("--quantization", default="auto")
    parser.add_argument("--threads", type=int, help="of the engine; default: as the service")
    add_bookkeeping(parser)
    options = parser.parse_args()
    model = ModelConfig.from_folder(resolve(options.model))
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        adapters = write_adapters(model, Path(folder), options.adapters, options.rank)
        if options.decode:
            rows += decode(adapters, options)
        else:
            for host in options.host:
                rows += measure(adapters, host, options)
    write_report("adapters", rows, ("torch",), folder=options.out, revision=options.commit)


def measure(
    adapters: list[AdapterRef], host: int, options: argparse.Namespace
) -> list[dict[str, Any]]:
    """Return the records of an engine that holds a number of adapters in host memory."""
    local = make_engine(options, options.streams, options.slots, host)
    streams, kinds = Streams(local, options), loads(adapters, options)
    runs: dict[str, list[dict[str, Any]]] = {name: [] for name in kinds}
    for _ in range(options.rounds):
        for name, kind in kinds.items():
            streams.run(kind, 2 * options.streams)  # the slots have adapters of another load
            runs[name].append(streams.run(kind, options.requests))
    found = [summary(name, host, runs[name]) for name in kinds]
    found += single(local.engine, adapters, options.samples)
    local.close()
    return found


def decode(adapters: list[AdapterRef], options: argparse.Namespace) -> list[dict[str, Any]]:
    """Return records with the times of decode steps."""
    chosen = adapters[: options.slots]
    kinds: dict[str, Callable[[], Iterator[AdapterRef | None]]] = {
        "model": lambda: itertools.repeat(None),
        "one": lambda: itertools.repeat(chosen[0]),
        "each": lambda: itertools.cycle(chosen),
    }
    records = []
    for slots in (0, options.slots):
        local = make_engine(options, max(options.decode), slots, len(adapters))
        streams = Streams(local, options)
        for count in options.decode:
            options.streams = count
            names = list(kinds) if slots else ["disabled"]
            gaps: dict[str, list[float]] = {name: [] for name in names}
            for name in names:
                streams.run(kinds.get(name, kinds["model"])(), count)
                local.use_idle_time()  # records the steps that the first run needed
            for _ in range(options.rounds):
                for name in names:
                    found = streams.run(kinds.get(name, kinds["model"])(), count)
                    gaps[name].append(statistics.median(found["gaps"]))
            for name in names:
                record = {
                    "load": name,
                    "sequences": count,
                    "step_ms": _ms(statistics.median(gaps[name])),
                }
                print(record, flush=True)
                records.append(record)
        local.close()
    return records


def make_engine(options: argparse.Namespace, sequences: int, slots: int, host: int) -> LocalEngine:
    """Return an engine for some sequences at a time.

    Args:
        options: of the command.
        sequences: how many.
        slots: of adapters on the device; 0 if the service has none.
        host: adapters in host memory.
    """
    block_size = _BLOCK_SIZE if options.device == "cpu" else _GPU_BLOCK_SIZE
    config = EngineConfig(
        model_path=str(resolve(options.model)),
        model_id=options.model,
        device=options.device,
        load_format="dummy" if options.dummy else "auto",
        quantization=options.quantization,
        cpu_threads=options.threads,
        max_num_seqs=sequences,
        max_model_len=options.prompt_tokens + options.output_tokens,
        enable_prefix_caching=False,
        max_draft_tokens=0,
        max_loras=slots,
        max_lora_rank=options.rank,
        max_cpu_loras=host,
        block_size=block_size,
    )
    return LocalEngine(config)


if __name__ == "__main__":
    main()

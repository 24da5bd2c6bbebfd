"""Measures the processor time of the engine process for a decode step, without the time of a device.

The engine is the service's, with the bundled model on the CPU, one step ahead as on a GPU. Its recordings compute
nothing: a replay returns at once and leaves the tokens of the recording. What remains is what the host does for a step:
scheduling, packing, reading and committing tokens, and sending the message to a process that drops it. Calls of the GPU
driver are missing. All sequences run through the measurement, or, with `--outputs`, each ends after that many tokens
and another takes its place, so that steps also admit prompts and their decode rows change.

    python -m benchmarks.host_steps [--rows 64 256 1024] [--outputs 256] [--prompt-tokens 128] [--steps 256]
"""

from __future__ import annotations

import argparse
import contextlib
import gc
import itertools
import math
import socket
import subprocess
import sys
import time
from typing import TYPE_CHECKING, Any

import numpy as np

from benchmarks.report import add_bookkeeping, write_report
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig, StepMessage
from server.engine.core.request import GenerateRequest
from server.engine.link.engine_process.process import Channel
from server.engine.link.engine_process.process_setup import freeze_startup_objects
from server.engine.link.sockets import Connection
from server.engine.runner.start.startup import start_engine

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator

    from server.engine.core.engine import Engine
    from server.engine.core.limits import SchedulerConfig
    from server.engine.core.messages import EngineMessage, FrontEndMessage

_SINK = "sink"
"""First argument with which this script receives and drops the engine's messages; an address follows."""
_WARM_STEPS = 32
_BUDGET = 1024
"""Tokens of a step while the prompts are computed."""


class _Nothing:
    """A recorder whose replays compute nothing."""

    def record(self, compute: Callable[[], object]) -> Callable[[], object]:
        compute()
        return lambda: None


class _RequestChannel(Channel):
    """The engine's channel; requests come from this process.

    Attributes:
        inbox: requests for the engine.
        num_tokens: tokens of the last message.
        num_ended: sequences that have ended.
    """

    def __init__(self, descriptor: int) -> None:
        super().__init__(Connection(descriptor))
        self.inbox: list[FrontEndMessage] = []
        self.num_tokens = 0
        self.num_ended = 0

    def send(self, message: EngineMessage) -> None:
        if isinstance(message, StepMessage):
            self.num_tokens = len(message.token_ids)
            self.num_ended += sum(map(bool, message.finish_reasons))
        super().send(message)

    def receive(self, *, wait: float) -> Iterator[FrontEndMessage]:
        requests, self.inbox = self.inbox, []
        return itertools.chain(requests, super().receive(wait=0 if requests else wait))


class _Measurement:
    """Owns an engine for steps of a number of rows.

    Args:
        rows: sequences that decode together.
        options: of the command.
        descriptor: of the connection to the sink, which the measurement owns.
    """

    def __init__(self, rows: int, options: argparse.Namespace, descriptor: int) -> None:
        self._rows, self._options = rows, options
        # The first sequences get tokens while the prompts of the others are computed.
        prefills = 2 * rows * options.prompt_tokens // _BUDGET + 8
        self._outputs = prefills + _WARM_STEPS + options.rounds * options.steps
        if options.outputs:
            self._outputs = options.outputs
        length = options.prompt_tokens + self._outputs
        self._channel = _RequestChannel(descriptor)
        config = EngineConfig(
            model_path=str(resolve(BUNDLED)), model_id="bundled", device="cpu", quantization="none", max_num_seqs=rows,
            max_num_batched_tokens=max(_BUDGET, 2 * rows), max_model_len=length,
            kv_cache_tokens=rows * (length + 32),
        )  # fmt: skip
        self._engine = _start(config, self._channel)
        self._generator = np.random.default_rng(0)
        self._num_requests = 0

    def run(self) -> list[dict[str, Any]]:
        """Return the microseconds of a step in each round."""
        for i in range(self._rows):
            # The first sequences to be replaced end one after the other.
            part = (i + 1) / self._rows if self._options.outputs else 1
            self._request(max(2, round(part * self._outputs)))
        runner, _ = _parts(self._engine)
        while self._options.outputs and runner.use_idle_time():
            pass  # also steps with prompts are recorded, as in a service that has been idle for a while
        self._engine.receive(wait=math.inf)
        for _ in range(2 * self._options.outputs):
            self._step()  # until every sequence was replaced
        while self._channel.num_tokens < self._rows - self._rows // 16:
            self._step()
        for _ in range(_WARM_STEPS):
            self._step()
        freeze_startup_objects()
        found = [self._round() for _ in range(self._options.rounds)]
        if not self._options.outputs:
            assert self._channel.num_tokens == self._rows, "all sequences are still running"
        return found

    def _request(self, outputs: int) -> None:
        sampling = SamplingParams(
            max_new_tokens=outputs, temperature=0.0, logprobs=self._options.logprobs
        )
        prompt = self._generator.integers(0, 4096, self._options.prompt_tokens).tolist()
        self._num_requests += 1
        self._channel.inbox.append(
            GenerateRequest(
                request_id=self._num_requests, prompt_token_ids=prompt, sampling=sampling
            )
        )

    def close(self) -> None:
        """Close the connection."""
        self._channel.close()

    def _step(self) -> None:
        while self._options.outputs and self._num_requests < self._rows + self._channel.num_ended:
            self._request(self._outputs)
        self._engine.receive(wait=0)
        self._engine.step()

    def _round(self) -> dict[str, Any]:
        steps = self._options.steps
        collections = sum(it["collections"] for it in gc.get_stats())
        process, thread, wall = time.process_time(), time.thread_time(), time.perf_counter()
        for _ in range(steps):
            self._step()
        scale = 1e6 / steps
        return {
            "process_us": scale * (time.process_time() - process),
            "loop_us": scale * (time.thread_time() - thread),
            "wall_us": scale * (time.perf_counter() - wall),
            "collections": sum(it["collections"] for it in gc.get_stats()) - collections,
        }


def _start(config: EngineConfig, channel: _RequestChannel) -> Engine:
    engine = start_engine(config, channel)
    # As the engine of a GPU does.
    engine._runs_ahead = True  # noqa: SLF001 - an option that a CPU has no use for
    runner, limits = _parts(engine)
    runner.record_steps(limits, _Nothing())
    return engine


def _parts(engine: Engine) -> tuple[Any, SchedulerConfig]:
    return engine._runner, engine._scheduler.config  # noqa: SLF001 - likewise


@contextlib.contextmanager
def _sink() -> Iterator[int]:
    """Run a process that drops messages; yield the descriptor of the connection to it."""
    ours, theirs = socket.socketpair()
    descriptor = theirs.fileno()
    command = [sys.executable, "-m", "benchmarks.host_steps", _SINK, str(descriptor)]
    with theirs:
        process = subprocess.Popen(command, pass_fds=[descriptor])
    try:
        yield ours.detach()
    finally:
        process.terminate()
        process.wait()


def _drop_messages(descriptor: int) -> None:
    connection = Connection(descriptor)
    while True:
        for _ in connection.receive(wait=math.inf):
            pass


def measure(rows: int, options: argparse.Namespace) -> dict[str, Any]:
    """Return the record of steps of a number of rows; its times are those of the fastest round."""
    with _sink() as descriptor, contextlib.closing(_Measurement(rows, options, descriptor)) as run:
        best = min(run.run(), key=lambda found: found["process_us"])
    record = {name: round(value, 1) for name, value in best.items()}
    return {
        "rows": rows,
        "outputs": options.outputs,
        "prompt_tokens": options.prompt_tokens,
        "logprobs": options.logprobs,
        **record,
        "process_us_per_row": round(best["process_us"] / rows, 3),
    }


def main() -> None:
    """Measure and write the result file."""
    if sys.argv[1:2] == [_SINK]:
        _drop_messages(int(sys.argv[2]))
        return
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rows", type=int, nargs="+", default=[64, 256, 1024])
    parser.add_argument("--outputs", type=int, default=0, help="tokens of each sequence; 0: all")
    parser.add_argument("--prompt-tokens", type=int, default=128)
    parser.add_argument("--steps", type=int, default=256, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=5, help="the fastest is reported")
    parser.add_argument(
        "--logprobs", action="store_true", help="report the probability of each token"
    )
    add_bookkeeping(parser)
    options = parser.parse_args()
    rows = [measure(count, options) for count in options.rows]
    libraries = ("torch", "numpy", "msgspec")
    write_report("host-steps", rows, libraries, folder=options.out, revision=options.commit)


if __name__ == "__main__":
    main()

"""Processes that compile for absent GPUs, restarted when a compiler takes one down.

Knows jobs and facts as JSON only.
"""

from __future__ import annotations

import dataclasses
import json
import os
import queue
import subprocess
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from collections.abc import Iterator, Sequence

    from tests.kernels.cross_compile_worker import Job

_ROOT = Path(__file__).parents[2]


class Worker:
    """One process of `cross_compile_worker --serve`."""

    def __init__(self, cache: Path | None) -> None:
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # A test process that interprets says so in its environment; a compiler must not.
        self._environment.pop("TRITON_INTERPRET", None)
        if cache is not None:
            self._environment["TRITON_CACHE_DIR"] = str(cache)
        self._process: subprocess.Popen[str] | None = None

    def answer(self, job: Job) -> dict[str, Any]:
        """Compile a job; a process that dies of it is an answer too."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "tests.kernels.cross_compile_worker", "--serve"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
                cwd=_ROOT,
                env=self._environment,
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        line = ""
        try:
            self._process.stdin.write(json.dumps(dataclasses.asdict(job)) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            facts: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            status = self.close()
            return {"error": f"the compiler ended the process, status {status}; it said {line!r}"}
        return facts

    def close(self) -> int | None:
        """End the process and return its exit status; None if there is none."""
        if self._process is None:
            return None
        process, self._process = self._process, None
        with process:
            process.kill() if process.poll() is None else None
        return process.returncode


class Pool:
    """Several workers that take jobs from one list."""

    def __init__(self, processes: int = 2, cache: Path | None = None) -> None:
        self._workers = [Worker(cache) for _ in range(processes)]

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        for worker in self._workers:
            worker.close()

    def run(self, jobs: Sequence[Job]) -> Iterator[tuple[Job, dict[str, Any]]]:
        """Compile all jobs and yield each with its facts, in the order in which they are done."""
        waiting: queue.SimpleQueue[Job | None] = queue.SimpleQueue()
        done: queue.SimpleQueue[tuple[Job, dict[str, Any]]] = queue.SimpleQueue()
        for job in (*jobs, *(None for _ in self._workers)):
            waiting.put(job)

        def work(worker: Worker) -> None:
            while (job := waiting.get()) is not None:
                done.put((job, worker.answer(job)))

        for worker in self._workers:
            threading.Thread(target=work, args=(worker,), daemon=True).start()
        for _ in jobs:
            yield done.get()

"""Processes that compile for absent GPUs, restarted when a compiler crashes. They exchange jobs and facts as JSON."""

from __future__ import annotations

import json
import os
import queue
import subprocess
import sys
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from tests.kernels.compile.cross_compile_jobs import Job
    from tests.kernels.compile.fused_compile_worker import FusedJob

MODULES = {
    "Job": "tests.kernels.compile.cross_compile_worker",
    "FusedJob": "tests.kernels.compile.fused_compile_worker",
}
"""The module that compiles each kind of job."""
_ROOT = Path(__file__).parents[3]


class Worker:
    """One process of `cross_compile_worker --serve`, or of another module with the same protocol."""

    def __init__(self, cache: Path | None, module: str, *options: str) -> None:
        self._arguments = [module, "--serve", *options]
        self._environment = {**os.environ, "OMP_NUM_THREADS": "1"}
        # The environment of an interpreting test process makes Triton interpret; a compiler must not.
        self._environment.pop("TRITON_INTERPRET", None)
        if cache is not None:
            self._environment["TRITON_CACHE_DIR"] = str(cache)
        self._process: subprocess.Popen[str] | None = None

    def answer(self, job: Job | FusedJob) -> dict[str, Any]:
        """Compile a job and return its facts; if the process dies, return an error."""
        if self._process is None:
            self._process = subprocess.Popen(
                [sys.executable, "-m", *self._arguments],
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
            self._process.stdin.write(json.dumps(job.to_json()) + "\n")
            self._process.stdin.flush()
            line = self._process.stdout.readline()
            facts: dict[str, Any] = json.loads(line)
        except (OSError, ValueError):
            status = self.close()
            error = f"the compiler ended the process, status {status}; it said {line!r}"
            return {"error": error, "ended": True}
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
    """Several workers that take jobs in the order in which they are given."""

    def __init__(
        self,
        processes: int = 2,
        *,
        disassemble: bool = False,
    ) -> None:
        options = ["--sass"] if disassemble else []
        self._workers = [Worker(None, MODULES["Job"], *options) for _ in range(processes)]
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(processes)

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: object) -> None:
        self._threads.shutdown(cancel_futures=True)
        for worker in self._workers:
            worker.close()

    def submit(self, job: Job | FusedJob) -> Future[dict[str, Any]]:
        """Compile a job when a worker is free."""
        return self._threads.submit(self._answer, job)

    def _answer(self, job: Job | FusedJob) -> dict[str, Any]:
        worker = self._idle.get()
        try:
            return worker.answer(job)
        finally:
            self._idle.put(worker)

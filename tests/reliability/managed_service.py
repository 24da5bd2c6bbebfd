"""A service whose processes, files and limits a test controls, and which it can start again."""

from __future__ import annotations

import contextlib
import os
import resource
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.request
from pathlib import Path
from typing import TYPE_CHECKING

from tests.reliability.processes import Process, Role, process_tree

if TYPE_CHECKING:
    from collections.abc import Mapping, Sequence

_HOST = "127.0.0.1"
_START_SECONDS = 180.0
_STOP_SECONDS = 60.0
_SERVE = ("-m", "server.cli.main", "serve")


def read_metrics(text: str) -> dict[str, float]:
    """Return the values of a reply of /metrics by name; series with labels are added up."""
    values: dict[str, float] = {}
    for line in text.splitlines():
        if not line.startswith("#"):
            name = line.split("{")[0].split(" ")[0]
            values[name] = values.get(name, 0.0) + float(line.rsplit(" ", 1)[1])
    return values


class ManagedService:
    """Owns a service on a port that stays the same over restarts, and a folder for its log and temporary files.

    Attributes:
        port: of the service.
        folder: has the log, and `tmp`, the service's folder for temporary files.
        process: the service's parent process.

    Args:
        options: of `tessera serve`.
        environment: variables to add to those of this process.
        program: arguments of Python that run the service; `options` follow. `{folder}` in them becomes `folder`.
        max_descriptors: limit of file descriptors of each process; None leaves the limit of this process.
        folder: existing empty folder; None makes one, which `close` removes.
    """

    def __init__(
        self,
        options: Sequence[str],
        environment: Mapping[str, str] | None = None,
        program: Sequence[str] = _SERVE,
        max_descriptors: int | None = None,
        folder: Path | None = None,
    ) -> None:
        with socket.create_server((_HOST, 0)) as probe:
            self.port: int = probe.getsockname()[1]
        self._owns_folder = folder is None
        self.folder = folder or Path(tempfile.mkdtemp(prefix="reliability-"))
        (self.folder / "tmp").mkdir()
        variables = {"TMPDIR": str(self.folder / "tmp"), **(environment or {})}
        self._command = ["env", *(f"{name}={value}" for name, value in variables.items())]
        self._command += [sys.executable, *(part.format(folder=self.folder) for part in program)]
        self._command += [f"--host={_HOST}", f"--port={self.port}"]
        self._command += options
        self._max_descriptors = max_descriptors
        self.process: subprocess.Popen[bytes]

    @property
    def log(self) -> Path:
        """The file that has the service's standard error."""
        return self.folder / "log"

    def start(self) -> None:
        """Start the service; does not wait until it is ready."""
        with self.log.open("ab") as log:
            self.process = subprocess.Popen(self._command, stderr=log)
        if (limit := self._max_descriptors) is not None:
            resource.prlimit(self.process.pid, resource.RLIMIT_NOFILE, (limit, limit))

    def wait_until_ready(self) -> float:
        """Wait for a 200 of /health; return the seconds that it took.

        Raises:
            SystemExit: the service ended, or is not ready in time.
        """
        began = time.monotonic()
        while time.monotonic() - began < _START_SECONDS:
            with contextlib.suppress(OSError):
                self.get("/health")
                return time.monotonic() - began
            if self.process.poll() is not None:
                break
            time.sleep(0.05)
        raise SystemExit(f"the service is not ready; the end of its log:\n{self.log_tail()}")

    def get(self, path: str) -> str:
        """Return the body of a reply with status 200.

        Raises:
            OSError: any other status, or no reply within 5 seconds.
        """
        with urllib.request.urlopen(f"http://{_HOST}:{self.port}{path}", timeout=5) as reply:
            text: str = reply.read().decode()
        return text

    def metrics(self) -> dict[str, float]:
        """Return the metrics by name; series with labels are added up."""
        return read_metrics(self.get("/metrics"))

    def processes(self, role: Role | None = None) -> list[Process]:
        """Return the processes that run, the parent first; with a role, only those."""
        tree = process_tree(self.process.pid)
        return [process for process in tree if role in (None, process.role)]

    def pids(self) -> list[int]:
        """Return the ids of all processes."""
        return [process.pid for process in self.processes()]

    def log_tail(self, num_bytes: int = 3000) -> str:
        """Return the end of the log."""
        return self.log.read_bytes()[-num_bytes:].decode(errors="replace")

    def leftover_files(self) -> list[str]:
        """Return the names in the service's folder for temporary files."""
        return sorted(file.name for file in (self.folder / "tmp").iterdir())

    def stop(self) -> int:
        """End the service by SIGTERM, after `_STOP_SECONDS` by SIGKILL; return its exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(_STOP_SECONDS)
            except subprocess.TimeoutExpired:
                self.kill()
        return self.process.wait()

    def kill(self) -> None:
        """End all processes at once."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self.process.wait()

    def close(self) -> None:
        """End the service if it runs, and remove its folder."""
        if hasattr(self, "process") and self.process.poll() is None:
            self.kill()
        if self._owns_folder:
            shutil.rmtree(self.folder, ignore_errors=True)

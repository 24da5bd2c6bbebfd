"""The service of `tessera run`, a process of its own that ends with the command.

The command starts it as `python -m server.cli.run.service` and sends its settings to its standard input. Signals of a
terminal are blocked (`server.engine.link.spawn`), so that Ctrl-C stops an answer and not the service.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING, Any, Self

import msgspec

from model.helper_process.command import module_command
from server.cli.exit_deadline import exit_bounded
from server.cli.settings import Settings
from server.engine.link.engine_process.process_setup import read_config
from server.engine.link.spawn import end, spawn
from server.standard_error import never_wait

if TYPE_CHECKING:
    from types import TracebackType

COMMAND = module_command("server.cli.run.service")
_LAST_SECONDS = 10.0
"""Time in which the service ends its engine; then it is killed, and the engine ends by itself."""


class Launch(msgspec.Struct, frozen=True):
    """What the process needs.

    Attributes:
        settings: of the service, as `Settings` takes them.
        port_fd: file descriptor that the port is written to.
    """

    settings: dict[str, Any]
    port_fd: int


class ServiceProcess:
    """A service in a process of its own; leaving the context ends it.

    Args:
        settings: of the service.

    Raises:
        OSError: the process cannot be started.
    """

    def __init__(self, settings: Settings) -> None:
        receiving, sending = os.pipe()
        self._port = os.fdopen(receiving, encoding="ascii")
        try:
            self._process = spawn(COMMAND, [sending])
        except OSError:
            self._port.close()
            raise
        finally:
            os.close(sending)
        assert self._process.stdin is not None
        launch = msgspec.json.encode(Launch(_given(settings), sending))
        with contextlib.suppress(BrokenPipeError):  # it has ended; `port` says so
            self._process.stdin.write(launch + b"\n")
            self._process.stdin.flush()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None
    ) -> None:
        """End the service and its engine."""
        self._port.close()
        if self.status is None:
            self._process.terminate()
            with contextlib.suppress(Exception):  # a timeout; another Ctrl-C also stops the waiting
                self._process.wait(_LAST_SECONDS)
        end(self._process)

    @property
    def status(self) -> int | None:
        """The exit status of the process; None while it runs."""
        return self._process.poll()

    def port(self) -> int | None:
        """Wait for the port that the service listens on; None if it ended instead, which its log explains."""
        line = self._port.readline()
        return int(line) if line else None


def main() -> None:
    """Serve until the command that started this process ends."""
    never_wait()
    launch = read_config(Launch)
    if launch is None:
        return
    threading.Thread(target=_stop_with_parent, name="parent-watch", daemon=True).start()
    # Imported here so that the command is watched meanwhile.
    from server.cli.serve import serve  # noqa: PLC0415 - as above

    def report(port: int) -> None:
        with os.fdopen(launch.port_fd, "w", encoding="ascii") as file:
            print(port, file=file)

    with exit_bounded():
        serve(Settings.model_validate(launch.settings), listening=report)


def _stop_with_parent() -> None:
    """Wait until standard input is closed, and end this process as a signal does."""
    while os.read(sys.stdin.fileno(), 1):
        pass
    os.kill(os.getpid(), signal.SIGTERM)


def _given(settings: Settings) -> dict[str, Any]:
    """Return the settings that differ from the defaults, in the form that they are read from."""
    values = settings.model_dump(mode="json", exclude_unset=True)
    if "data_parallel" in values and values["data_parallel"] is None:
        values["data_parallel"] = "auto"
    return values


if __name__ == "__main__":
    main()

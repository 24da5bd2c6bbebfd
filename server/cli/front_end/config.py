"""Configuration of a front-end process."""

from __future__ import annotations

import signal
from typing import Final

import msgspec

from server.http.config import HTTPConfig
from server.log import LogFormat

STOP_SIGNAL: Final = signal.SIGUSR2
"""Makes a front end end its service; a second one ends its requests at once. Its parent translates the signals
that end a service, which a front end ignores: a terminal or a container may send them to all processes, and both would
then arrive twice.
"""


class FrontEndConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Configuration of a front-end process: one line of JSON on its standard input.

    Attributes:
        link: inherited descriptor of the connection to the hub.
        first_id: first request id.
        listener: inherited descriptor of the socket that accepts HTTP connections.
        counters: inherited descriptor of the counters that all processes of the service share.
        rows: number of rows of the counters.
        row: index of this process's row.
        tokenizer_path: folder with tokenizer.json.
        hang_seconds: a hub that is silent for this long is lost.
        http: limits and intervals.
        log_level: name of a logging level.
        log_format: "text" or "json".
    """

    link: int
    first_id: int
    listener: int
    counters: int
    rows: int
    row: int
    tokenizer_path: str
    hang_seconds: float
    http: HTTPConfig
    log_level: str
    log_format: LogFormat = "text"

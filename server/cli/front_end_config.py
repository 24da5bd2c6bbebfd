"""What a front-end process is told when it is started. Knows neither who tells it nor what it does with it."""

from __future__ import annotations

import msgspec

from server.http.config import HTTPConfig


class FrontEndConfig(msgspec.Struct, frozen=True, kw_only=True):
    """Everything a front-end process needs to know.

    Attributes:
        address: of its line to the hub.
        first_id: of its requests.
        directory: of the hub's sockets.
        listener: descriptor of the socket to accept connections from; inherited.
        board: file of the board that all processes of the service count on.
        rows: of the board.
        row: of the board, this process's.
        tokenizer_path: folder with tokenizer.json.
        http: limits and intervals.
        log_level: name of a logging level.
    """

    address: str
    first_id: int
    directory: str
    listener: int
    board: str
    rows: int
    row: int
    tokenizer_path: str
    http: HTTPConfig
    log_level: str

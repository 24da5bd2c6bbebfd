"""Parses a stream of server-sent events."""

from __future__ import annotations


class EventReader:
    """Parses one stream, which may be split anywhere.

    Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream"; fields other than `data` are skipped.
    """

    __slots__ = ("_rest",)

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, data: bytes) -> list[bytes]:
        """Parse the next piece.

        Returns:
            The data of each event that the piece completes; nothing for comments and events without data.
        """
        if self._rest:
            data = self._rest + data
        if b"\r" in data:
            held = b"\r" if data.endswith(b"\r") else b""  # the line feed may be in the next piece
            data = data.removesuffix(held).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + held
        blocks = data.split(b"\n\n")
        self._rest = blocks.pop()
        events = []
        for block in blocks:
            if block.startswith(b"data:") and b"\n" not in block:
                events.append(block[5:].removeprefix(b" "))
            elif (lines := _data_lines(block)) is not None:
                events.append(lines)
        return events


def _data_lines(block: bytes) -> bytes | None:
    lines = [
        line[5:].removeprefix(b" ") for line in block.split(b"\n") if line.startswith(b"data:")
    ]
    return b"\n".join(lines) if lines else None

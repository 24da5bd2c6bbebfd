"""Parses a stream of server-sent events."""

from __future__ import annotations


class EventReader:
    """Parses one stream, which may be split anywhere.

    Source: WHATWG HTML, section 9.2.6, "Interpreting an event stream"; fields other than `data` are skipped.
    """

    __slots__ = ("_held", "_pieces")

    def __init__(self) -> None:
        self._held = b""
        self._pieces: list[bytes] = []

    def feed(self, data: bytes) -> list[bytes]:
        """Parse the next piece.

        Returns:
            The data of each event that the piece completes; nothing for comments and events without data.
        """
        if self._held or b"\r" in data:
            data = self._held + data
            self._held = (
                b"\r" if data.endswith(b"\r") else b""
            )  # the line feed may be in the next chunk
            data = data.removesuffix(self._held).replace(b"\r\n", b"\n").replace(b"\r", b"\n")
        # Joined only at the end of an event: to join each chunk with those before it takes the square of the time.
        if self._pieces:
            if b"\n\n" not in self._pieces[-1][-1:] + data:
                self._pieces += [data] if data else []
                return []
            data = b"".join([*self._pieces, data])
        blocks = data.split(b"\n\n")
        rest = blocks.pop()
        self._pieces = [rest] if rest else []
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

"""Reads receipts from files: alone, one after the other, or within replies and the events of streams."""

from __future__ import annotations

import json
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Final

from server.receipts.record import ReceiptError, read_receipt

if TYPE_CHECKING:
    from collections.abc import Callable, Iterator, Sequence

    from server.receipts.record import Receipt

STANDARD_INPUT: Final = "-"
_FIELD: Final = "receipt"
_RESPONSE: Final = "response"
_DATA: Final = "data:"
_EVENT_FIELDS: Final = ("event:", "id:", "retry:", ":")
_END_MARK: Final = "[DONE]"
_BLANK: Final = " \t\r\n"


@dataclass(frozen=True, slots=True)
class NamedReceipt:
    """A receipt, and what to call it in messages."""

    name: str
    receipt: Receipt


def read_files(files: Sequence[str], note: Callable[[str], None]) -> list[NamedReceipt]:
    """Read all receipts of some files.

    Args:
        files: their paths; `-` is standard input.
        note: called with a sentence about replies that have none.

    Raises:
        ReceiptError: a file cannot be read, is not JSON, has something else than receipts, or has none.
    """
    found = []
    for file in files:
        shown = "standard input" if file == STANDARD_INPUT else file
        place = f"{shown}: " if len(files) > 1 else ""
        receipts = list(_receipts(_read(file, shown), shown, note))
        if not receipts:
            raise ReceiptError(
                f"{shown} has no receipt; a reply has one if its request has `receipt: true`"
            )
        found += [
            NamedReceipt(f"{place}receipt {number}", it) for number, it in enumerate(receipts, 1)
        ]
    return found


def _read(file: str, shown: str) -> str:
    try:
        content = sys.stdin.buffer.read() if file == STANDARD_INPUT else Path(file).read_bytes()
        return content.decode("utf-8-sig")
    except OSError as error:
        raise ReceiptError(f"{shown} cannot be read: {error.strerror}") from None
    except ValueError as error:  # also of a name with a NUL character
        raise ReceiptError(f"{shown} is not a text in UTF-8: {error}") from None


def _receipts(text: str, shown: str, note: Callable[[str], None]) -> Iterator[Receipt]:
    is_stream = text.lstrip(_BLANK).startswith((_DATA, *_EVENT_FIELDS))
    without, last, has_any = 0, 0, False
    for line, value in _events(text, shown) if is_stream else _values(text, 1, shown):
        found = list(_within(value))
        if not found and not is_stream:  # nearly all events of a stream have none
            without, last = without + 1, line
        has_any |= bool(found)
        for plain in found:
            try:
                yield read_receipt(plain)
            except ReceiptError as error:
                raise ReceiptError(f"{shown}, line {line}: {error}") from None
    if without and has_any:
        note(f"{shown}: {without} of its JSON values have no receipt, such as that in line {last}")


def _within(value: object) -> Iterator[object]:
    """Yield the receipts in a JSON value: itself, that of a reply, or those of an array of replies."""
    left = [value]
    while left:
        value = left.pop()
        if isinstance(value, list):
            left += reversed(value)
        elif not isinstance(value, dict):
            continue
        elif _FIELD in value:
            if value[_FIELD] is not None:
                yield value[_FIELD]
        elif isinstance(value.get(_RESPONSE), dict):
            left.append(value[_RESPONSE])
        elif {"conditions", "outputs"} & value.keys():
            yield value


def _events(text: str, shown: str) -> Iterator[tuple[int, Any]]:
    """Yield the line and the JSON of each event of a stream."""
    for number, line in enumerate(text.splitlines(), 1):
        data = line.removeprefix(_DATA).strip(_BLANK)
        if line.startswith(_DATA) and data and data != _END_MARK:
            yield from _values(data, number, shown)


def _values(text: str, line: int, shown: str) -> Iterator[tuple[int, Any]]:
    """Yield the JSON values of a text, which follow one another, each with its first line."""
    decoder = json.JSONDecoder()
    position = 0
    while True:
        while position < len(text) and text[position] in _BLANK:
            line += text[position] == "\n"
            position += 1
        if position == len(text):
            return
        try:
            value, end = decoder.raw_decode(text, position)
        except (ValueError, RecursionError) as error:
            if isinstance(error, json.JSONDecodeError):
                problem = f"{error.msg} at column {error.colno}"
                line += text.count("\n", position, error.pos)
            else:
                problem = "too deep" if isinstance(error, RecursionError) else str(error)
            raise ReceiptError(f"{shown}, line {line} is not JSON: {problem}") from None
        yield line, value
        line += text.count("\n", position, end)
        position = end

"""Keeps the memory of texts that are being tokenized within what is free, so that the system never ends the process."""

from __future__ import annotations

import asyncio
import collections
import contextlib
from typing import TYPE_CHECKING, Final

from model.device.host_memory import free_host_bytes, total_host_bytes
from server.errors import BodyTooLargeError, OverloadedError

if TYPE_CHECKING:
    from collections.abc import Callable

BYTES_PER_BYTE: Final = 350
"""Memory that the library takes for a byte of text at most (punctuation: 323, English: 187; byte-level BPE)."""

_INCLUDED_GROWTH: Final = 2.0  # that of byte-level tokenizers, with which it was measured
_SHARE: Final = 0.8  # of the free memory; the rest is for everything else


class TokenizerMemory:
    """Counts the memory of the texts that are being tokenized. Used only on the event loop.

    A text waits while others take the memory that it needs, in the order of arrival. One for which there is not enough
    although no other is being tokenized is refused.

    Args:
        growth: factor by which the tokenizer can lengthen a text.
    """

    def __init__(self, growth: float) -> None:
        self._per_byte = BYTES_PER_BYTE * max(1.0, growth / _INCLUDED_GROWTH)
        self._reserved = 0
        self._waiting: collections.deque[asyncio.Future[None]] = collections.deque()

    async def acquire(self, size: int) -> int:
        """Wait until the memory for a text of `size` bytes is free, and count it.

        Returns:
            What to give to `release`.

        Raises:
            OverloadedError: there is too little memory at the moment.
            BodyTooLargeError: there would be too little if nothing else used memory.
        """
        needed = int(size * self._per_byte)
        try:
            if self._waiting:
                await self._turn(self._waiting.append)
            # What others have taken by now is counted twice: rather too much than too little.
            while needed > _SHARE * free_host_bytes() - self._reserved:
                if not self._reserved:
                    raise _refusal(needed, size)
                await self._turn(self._waiting.appendleft)
            self._reserved += needed
        finally:
            self._wake()
        return needed

    def release(self, needed: int) -> None:
        """Count the memory of a text no more."""
        self._reserved -= needed
        self._wake()

    async def _turn(self, enqueue: Callable[[asyncio.Future[None]], None]) -> None:
        turn = asyncio.get_running_loop().create_future()
        enqueue(turn)
        try:
            await turn
        finally:
            with contextlib.suppress(ValueError):  # it was its turn
                self._waiting.remove(turn)

    def _wake(self) -> None:
        """Let the first one look again."""
        if self._waiting and not self._waiting[0].done():
            self._waiting[0].set_result(None)


def _refusal(needed: int, size: int) -> OverloadedError | BodyTooLargeError:
    total, free = int(_SHARE * total_host_bytes()), int(_SHARE * free_host_bytes())
    text = f"a text of {size} bytes may take {needed >> 20} MiB of memory while it is tokenized"
    if needed > total:
        return BodyTooLargeError(f"{text}, and the service may use {total >> 20} MiB")
    return OverloadedError(f"{text}, and {free >> 20} MiB are free")

"""Renders conversations for clients, which share the processes that do it."""

from __future__ import annotations

from typing import TYPE_CHECKING, Final

import msgspec

from model.text.rendering.renderer import MOST_PROCESSES, RENDERERS
from server.http.load.fair_queue import FairPlaces

if TYPE_CHECKING:
    from collections.abc import Callable

    from model.text.chat_template import Conversation
    from server.http.text.tokenizing import TokenizerThreads

_MOST_OF_A_CLIENT: Final = MOST_PROCESSES // 2
_INLINE_BYTES: Final = 16 * 1024
"""Size of the JSON up to which a conversation is prepared on the event loop, which takes less than a thread does."""


class ChatRenderer:
    """Owns a place for each process that renders. Used only on the event loop.

    A conversation may take a second. So one client has half of the places at most, and where all are in use, clients
    take turns.

    Args:
        threads: prepare long conversations.
    """

    def __init__(self, threads: TokenizerThreads) -> None:
        self._threads = threads
        self._places = FairPlaces(MOST_PROCESSES, most_of_a_client=_MOST_OF_A_CLIENT)

    async def render(
        self, prepare: Callable[[], Conversation], given: object, client: str
    ) -> tuple[Conversation, str]:
        """Return a conversation and its text, for `Conversation.finish`.

        Args:
            prepare: returns the conversation; must not use state that the event loop changes.
            given: plain JSON values that it is made of.
            client: whose it is, as `server.http.request_id.CurrentRequest.client`.

        Raises:
            CapacityError: there is too little memory for it at the moment.
            BodyTooLargeError: there never is enough.
            Exception: as `ChatTemplate.prepare` and `Conversation.render`.
        """
        size = len(msgspec.json.encode(given))
        if size <= _INLINE_BYTES:
            conversation = prepare()
        else:
            conversation = await self._threads.run(prepare, size, client)
        await self._places.acquire(client)
        try:
            return conversation, await conversation.render()
        finally:
            self._places.release(client)

    def close(self) -> None:
        """End the processes; what they render fails."""
        RENDERERS.end()

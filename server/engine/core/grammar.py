"""The interface of a grammar's state."""

from __future__ import annotations

from collections.abc import Set
from typing import Protocol


class Matcher(Protocol):
    """The state of a sequence's grammar; implemented by `model.sampling.grammar.GrammarMatcher`."""

    def accept(self, token_id: int) -> bool:
        """Advance by one token; return whether the grammar allows it and its limits are kept."""

    def continues_after(self, token_id: int) -> bool:
        """Advance by one token if it is known that nothing is forced after it and the output goes on.

        Returns:
            Whether it did; otherwise the state is the same as before.
        """

    def take_ahead(self, token_id: int, most: int, end_ids: Set[int]) -> list[int] | None:
        """Advance by a token and by all that are forced after it, if they are known and the output goes on.

        Args:
            token_id: the token.
            most: tokens after which the output would end.
            end_ids: of tokens that would end the output.

        Returns:
            All of these tokens; None if the state is the same as before.
        """

    def forced_tokens(self) -> list[int]:
        """Return the next tokens where the grammar allows one text only; they are not accepted yet."""

    @property
    def is_complete(self) -> bool:
        """Whether the output follows the grammar and nothing can be appended to it."""

    @property
    def error(self) -> str:
        """Why the matcher cannot continue; empty if it can."""

"""The state of a grammar, whose tokens may be accepted ahead of its owner, in this process or in another."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Set
from typing import Final, NamedTuple


class MatcherRules(NamedTuple):
    """What a request adds to its grammar.

    Attributes:
        ends_from: number of tokens from which on the model's end tokens may be sampled where the grammar allows them.
        most_tokens: tokens after which the output ends; no more of them are followed.
        follows_forced: whether `TokenMasker.advance` follows tokens that are forced.
    """

    ends_from: float = 0
    most_tokens: int = 0
    follows_forced: bool = False


NO_RULES: Final = MatcherRules()
FAILURE: Final = "the grammar cannot be followed: an internal error"
"""The error of a matcher that has failed."""


class FollowedMatcher(ABC):
    """The state of a grammar after some tokens, which may be some tokens ahead of its owner.

    Whoever computes masks accepts the tokens of a step, follows those that are forced, and sets the attributes. The
    owner then accepts the same tokens one by one, which only confirms them. Not thread-safe.

    Attributes:
        rules: what the request adds.
        num_tokens: accepted tokens, with those ahead.
        ahead: accepted tokens that the owner has not accepted yet.
        is_refused: whether the last token ahead was not allowed.
        has_failed: whether following the grammar raised an error.
        has_stopped: whether the grammar ends after the tokens ahead, or cannot be followed further.
        is_masked: whether the mask in `slot` is that of the state after the tokens ahead.
        is_followed: whether no token is forced in that state.
        slot: row of `HostMasks.words`; -1 for none. A matcher that is gone leaves it to another one.
    """

    __slots__ = (
        "__weakref__", "ahead", "has_failed", "has_stopped", "is_followed", "is_masked", "is_refused", "num_tokens",
        "rules", "slot",
    )  # fmt: skip

    def __init__(self, rules: MatcherRules) -> None:
        self.rules = rules
        self.num_tokens, self.slot = 0, -1
        self.ahead: list[int] = []
        self.is_refused = self.has_stopped = self.has_failed = False
        self.is_masked = self.is_followed = False

    @property
    def num_left(self) -> int:
        """Number of further tokens that may be followed if they are forced."""
        return self.rules.most_tokens - self.num_tokens if self.rules.follows_forced else 0

    def accept(self, token_id: int) -> bool:
        """Advance by one token; return whether the grammar allows it and its limits are kept."""
        ahead = self.ahead
        if ahead:
            return token_id == ahead.pop(0) and (bool(ahead) or not self.is_refused)
        self.is_masked = self.is_followed = False
        self.num_tokens += 1
        return self._consume(token_id)

    def continues_after(self, token_id: int) -> bool:
        """Advance by one token if nothing else has to be done for it; return whether it did.

        That is a token that was accepted ahead, after which none is forced and the output does not end.
        """
        ahead = self.ahead
        if len(ahead) != 1 or ahead[0] != token_id or self.is_refused or self.has_stopped:
            return False
        ahead.clear()
        return True

    def take_ahead(self, token_id: int, most: int, end_ids: Set[int]) -> list[int] | None:
        """Advance by a token and those that were followed after it; None, and no change, if more has to be done.

        That is if the token was not accepted ahead, if others may be forced after those, or if the output ends.

        Args:
            token_id: the token.
            most: tokens after which the output would end.
            end_ids: of tokens that would end the output.
        """
        ahead = self.ahead
        if not ahead or ahead[0] != token_id or self.is_refused or self.has_stopped:
            return None
        if len(ahead) > most or not end_ids.isdisjoint(ahead):
            return None
        if self.rules.follows_forced and not self.is_followed:
            return None
        self.ahead = []
        return ahead

    def forced_tokens(self) -> list[int]:
        """Return the next tokens where the grammar allows one text only; they are not accepted yet.

        They are those that the tokenizer makes of that text. Tokens at its end that could merge with what follows are
        left out.
        """
        if self.ahead:
            return self.ahead.copy()
        return [] if self.is_followed else self._find_forced()

    @property
    def is_complete(self) -> bool:
        """Whether the output follows the grammar and nothing can be appended to it."""
        if self.ahead or (self.is_masked and not self.has_stopped):
            return False
        return self._ends()

    def take_over(self, other: FollowedMatcher) -> None:
        """Take over the state of a matcher of which this one is a copy; it has no mask."""
        self.num_tokens, self.ahead = other.num_tokens, other.ahead.copy()
        self.is_refused, self.has_stopped = other.is_refused, other.has_stopped
        self.has_failed = other.has_failed

    @abstractmethod
    def copy(self) -> FollowedMatcher:
        """Return an independent matcher in the same state."""

    @property
    def error(self) -> str:
        """Why the matcher cannot continue; empty if it can."""
        return FAILURE if self.has_failed else self._find_error()

    def fail(self) -> None:
        """Note that the grammar cannot be followed because of an error that is not the request's."""
        self.is_refused = self.has_stopped = self.has_failed = True

    @abstractmethod
    def _find_error(self) -> str: ...

    @abstractmethod
    def _consume(self, token_id: int) -> bool: ...

    @abstractmethod
    def _find_forced(self) -> list[int]: ...

    @abstractmethod
    def _ends(self) -> bool: ...

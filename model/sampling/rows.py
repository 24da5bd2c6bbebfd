"""The input of the sampler for one row: request parameters, position of the token, and the tokens before it."""

from __future__ import annotations

from collections.abc import Sequence

import msgspec
import numpy as np
import numpy.typing as npt

from model.sampling.parameters import SamplingParams


class TokenHistory:
    """The tokens of one sequence and the counts of its output tokens, which are updated incrementally.

    Attributes:
        token_ids: prompt and output. Not copied: tokens that are appended later become part of the history.
        num_prompt_tokens: leading tokens of `token_ids` that are the prompt.
    """

    def __init__(self, token_ids: Sequence[int] = (), num_prompt_tokens: int = 0) -> None:
        self.token_ids = token_ids
        self.num_prompt_tokens = num_prompt_tokens
        self._prompt_ids: npt.NDArray[np.int64] | None = None
        self._counts: dict[int, int] = {}
        self._num_counted = num_prompt_tokens

    def followed_by(self, token_ids: Sequence[int]) -> TokenHistory:
        """Return the history of these tokens and `token_ids` after them, which are output; this one stays as it is."""
        self.output_counts()
        longer = TokenHistory([*self.token_ids, *token_ids], self.num_prompt_tokens)
        longer._prompt_ids = self._distinct_prompt_ids()
        longer._counts, longer._num_counted = self._counts.copy(), self._num_counted
        return longer

    def output_counts(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """Return the distinct output tokens, and how often each was generated."""
        counts = self._counts
        for token_id in self.token_ids[self._num_counted :]:
            counts[token_id] = counts.get(token_id, 0) + 1
        self._num_counted = len(self.token_ids)
        return np.fromiter(counts.keys(), np.int64), np.fromiter(counts.values(), np.int64)

    def seen_ids(self) -> npt.NDArray[np.int64]:
        """Return the distinct tokens of the prompt, then those of the output; some are in both."""
        return np.concatenate((self._distinct_prompt_ids(), self.output_counts()[0]))

    def _distinct_prompt_ids(self) -> npt.NDArray[np.int64]:
        if self._prompt_ids is None:
            prompt = self.token_ids[: self.num_prompt_tokens]
            self._prompt_ids = np.unique(np.asarray(prompt, dtype=np.int64))
        return self._prompt_ids


class SamplingRow(msgspec.Struct, frozen=True):
    """How the token of one row of logits is chosen.

    Attributes:
        parameters: the sampling parameters of the request.
        position: position in the sequence of the token to sample; together with the seed it determines the noise.
        history: the tokens before it; may lack the latest tokens unless `parameters.needs_history`.
    """

    parameters: SamplingParams
    position: int
    history: TokenHistory

    @property
    def num_output_tokens(self) -> int:
        """Output tokens before this one."""
        return self.position - self.history.num_prompt_tokens

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the argmax of the unmodified logits, and no other tokens are reported."""
        return self.num_output_tokens >= self.parameters.argmax_from

    def banned_ids(self) -> tuple[int, ...]:
        """Return the ids that cannot be sampled."""
        return self.parameters.banned_ids(self.history.token_ids, self.num_output_tokens)

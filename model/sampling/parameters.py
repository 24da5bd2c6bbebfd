"""What the sampler is asked for and answers, and the counter-based random numbers behind its draws.

Knows neither tensors nor devices: `model.sampling.host` and `model.sampling.device` do the arithmetic.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

_MASK64 = (1 << 64) - 1
_GOLDEN = 0x9E3779B97F4A7C15

WEIGHT_SCALE = 2.0**40
"""Probabilities are summed as integers: the weight exp(logit - largest logit) in units of 2^-40.

Integer sums do not depend on the order of the additions, so neither the number of rows nor the device's way of
splitting a sum can change a draw. 2^40 leaves room for 2^22 tokens in an int64, and whatever it rounds to zero
is less likely than the best token by a factor of 10^12.
"""


NOT_FINITE = "the model's scores for this token are not finite numbers"
"""What `SampledToken.error` says of a row without a usable largest logit."""


class SampledToken(NamedTuple):
    """The sampler's answer for one row.

    Attributes:
        token_id: the token drawn; None where `error` is set.
        logprob: natural logarithm of its probability under the unmodified logits; None where not asked for.
        top: (token id, log-probability), most likely first, equals by smaller id.
        error: why this row has no token. Other rows of the batch are not affected.
    """

    token_id: int | None = None
    logprob: float | None = None
    top: tuple[tuple[int, float], ...] = ()
    error: str | None = None


class TokenHistory:
    """Which tokens a sequence has seen, kept between its steps so that penalties cost no pass over the text.

    Invariant: `counts` sums to the number of absorbed output tokens. Belongs to one sequence.
    """

    def __init__(self) -> None:
        self.prompt_ids: npt.NDArray[np.int64] | None = None
        self.counts: dict[int, int] = {}
        self._num_absorbed = 0

    def absorb(self, prompt_ids: Sequence[int], output_ids: Sequence[int]) -> None:
        """Take in the tokens added since the last call.

        Args:
            prompt_ids: the same at every call; read at the first one only.
            output_ids: all output tokens so far; those of the last call first.
        """
        if self.prompt_ids is None:
            self.prompt_ids = np.unique(np.asarray(prompt_ids, dtype=np.int64))
        for token_id in output_ids[self._num_absorbed :]:
            self.counts[token_id] = self.counts.get(token_id, 0) + 1
        self._num_absorbed = len(output_ids)

    def output_ids(self) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32]]:
        """Return the distinct output tokens, and how often each was generated."""
        size = len(self.counts)
        return (
            np.fromiter(self.counts.keys(), np.int64, size),
            np.fromiter(self.counts.values(), np.float32, size),
        )

    def seen_ids(self) -> npt.NDArray[np.int64]:
        """Return the tokens of prompt and output; one that is in both comes twice."""
        assert self.prompt_ids is not None
        return np.concatenate((self.prompt_ids, self.output_ids()[0]))


@dataclass(slots=True, kw_only=True)
class SamplingRow:
    """How the token of one row of logits is chosen. The fields are those of the request, already checked.

    Attributes:
        seed: unsigned 64-bit.
        position: of the token being drawn in its whole sequence; with the seed it decides the draw.
        temperature: 0 takes the most likely token; the filters below are then ignored, penalties are not.
        top_k: tokens kept, and all that tie with the last of them; 0 keeps all.
        top_p: mass kept, in (0, 1]; 1 keeps all.
        min_p: smallest probability kept, relative to the largest, in [0, 1]; 0 keeps all.
        typical_p: mass of locally typical tokens kept, in (0, 1]; 1 keeps all.
        repetition_penalty: divides positive and multiplies negative logits of tokens in prompt or output; 1 is off.
        presence_penalty: subtracted once from the logits of tokens in the output.
        frequency_penalty: subtracted from a token's logit for each time it is in the output.
        banned: ids that cannot be drawn.
        prompt_ids: needed with a repetition penalty only.
        output_ids: tokens generated so far; needed with any penalty only.
        history: where given, it is brought up to date instead of counting prompt and output anew.
        logprobs: whether the drawn token's log-probability is wanted; implied by `top_logprobs`.
        top_logprobs: number of most likely tokens wanted.
    """

    seed: int = 0
    position: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    typical_p: float = 1.0
    repetition_penalty: float = 1.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    banned: Sequence[int] = ()
    prompt_ids: Sequence[int] = ()
    output_ids: Sequence[int] = ()
    history: TokenHistory | None = None
    logprobs: bool = False
    top_logprobs: int = 0

    @property
    def has_penalties(self) -> bool:
        """Whether tokens seen before change the logits."""
        return (
            self.repetition_penalty != 1.0
            or self.presence_penalty != 0.0
            or self.frequency_penalty != 0.0
        )

    @property
    def is_argmax(self) -> bool:
        """Whether the token is the most likely one of the logits as they are."""
        return self.temperature == 0.0 and not self.banned and not self.has_penalties

    @property
    def is_filtered(self) -> bool:
        """Whether some tokens are cut off before the draw."""
        return self.top_k > 0 or self.top_p < 1.0 or self.min_p > 0.0 or self.typical_p < 1.0

    @property
    def wants_logprobs(self) -> bool:
        """Whether the row's log-probabilities are to be computed."""
        return self.logprobs or self.top_logprobs > 0

    @property
    def inverse_temperature(self) -> float:
        """1 / temperature, within what a product with finite and infinite float32 differences can take."""
        return min(max(1.0 / self.temperature, 1e-30), 1e30)

    @property
    def min_p_distance(self) -> float:
        """Largest distance from the best token's scaled logit that `min_p` keeps."""
        return float(-np.log(self.min_p)) if self.min_p > 0.0 else float("inf")

    def up_to_date_history(self) -> TokenHistory:
        """Return the tokens seen so far, the row's own `history` where it has one."""
        history = TokenHistory() if self.history is None else self.history
        history.absorb(self.prompt_ids, self.output_ids)
        return history


def _mix(value: int) -> int:
    value = ((value ^ (value >> 30)) * 0xBF58476D1CE4E5B9) & _MASK64
    value = ((value ^ (value >> 27)) * 0x94D049BB133111EB) & _MASK64
    return value ^ (value >> 31)


def uniform(seed: int, position: int) -> float:
    """Return the random number in [0, 1) of one token of one sequence, a multiple of 2^-53.

    It is a function of its arguments alone: no generator is advanced, so a token's draw does not depend on
    what else is in the batch, on preemption or on how often the step was repeated.

    Args:
        seed: taken modulo 2^64. Neighbouring seeds give unrelated streams: the seed is mixed before use.
        position: >= 0.

    Source: SplitMix64 (Steele, Lea, Flood 2014), its state set to the mixed seed and advanced by `position`.
    """
    state = (_mix((seed + _GOLDEN) & _MASK64) + (position + 1) * _GOLDEN) & _MASK64
    return (_mix(state) >> 11) * 2.0**-53

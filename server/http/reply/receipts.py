"""Receipts of replies: notes the tokens of a request that asks for one, and builds it.

A request without `receipt` runs none of this.
"""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import logging
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final, cast

from msgspec import UNSET, UnsetType
from msgspec.structs import replace

from model.checkpoint_digest import Signature, checkpoint_digest, checkpoint_signature
from model.errors import ModelError
from model.hub.cache import commit_of
from server.receipts.conditions import conditions_of, is_deterministic
from server.receipts.record import (
    REASONS,
    LogprobDigest,
    ReceiptOutput,
    make_receipt,
    token_digest,
)

if TYPE_CHECKING:
    from collections.abc import Iterable, Sequence

    from server.engine.core.messages import EngineInfo
    from server.http.reply.completion import Completion
    from server.receipts.record import Logprobs, Reason, Receipt

log = logging.getLogger("tessera")

_AT_ONCE: Final = 64
"""Tokens whose log-probabilities are added to a digest before other requests have their turn. With 20 alternatives
each, 10,000 tokens take 45 ms, and these 0.3."""
_MOST_SECONDS: Final = 30.0
"""Time that a reply waits for the digest: that of 30 GB of weights. Later replies have it without waiting."""


class WeightsDigest:
    """Computes the digest of the served checkpoint when it is first asked for, in a thread. Used on the event loop.

    Args:
        checkpoint: folder or file of the weights that the engine has loaded; empty if they are from none.

    Attributes:
        revision: the commit of which the checkpoint is a snapshot; None if it is none.
    """

    def __init__(self, checkpoint: str) -> None:
        self.revision = commit_of(Path(checkpoint))
        self._checkpoint = checkpoint
        self._signature: Signature | None = None
        self._problem = "" if checkpoint else "the weights are random"
        if checkpoint:
            try:
                self._signature = checkpoint_signature(Path(checkpoint))
            except ModelError as error:
                self._fail(error)
        self._digest: asyncio.Future[tuple[str | None, str]] | None = None

    async def get(self) -> tuple[str | None, str]:
        """Return the digest, or None and the reason why there is none; waits for `_MOST_SECONDS` at most."""
        if self._signature is None:
            return None, self._problem
        if self._digest is None:
            loop = asyncio.get_running_loop()
            self._digest = loop.create_future()
            # A daemon, because the end of the service must not wait for it.
            threading.Thread(
                target=self._compute, args=(loop, self._digest), name="weights-digest", daemon=True
            ).start()
        try:
            return await asyncio.wait_for(asyncio.shield(self._digest), _MOST_SECONDS)
        except TimeoutError:
            return None, f"it takes more than {_MOST_SECONDS:.0f} seconds; later receipts have it"

    def _compute(
        self, loop: asyncio.AbstractEventLoop, found: asyncio.Future[tuple[str | None, str]]
    ) -> None:
        digest = None
        try:
            digest = checkpoint_digest(Path(self._checkpoint), self._signature)
        except Exception as error:  # noqa: BLE001 - requests wait for the result
            self._fail(error)
        result = digest, self._problem
        with contextlib.suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(found.set_result, result)

    def _fail(self, error: Exception) -> None:
        # Clients must not learn paths of this machine.
        self._problem = "the files of the checkpoint cannot be read as they were loaded"
        log.warning("receipts will have no digest of the weights: %s", error)


class PendingReceipt:
    """The receipt of one request, until all that it says is known.

    Args:
        weights: the digest of the checkpoint.
        info: reported by the running engine.
        deterministic: whether the request asks for the same bits whatever else is computed.
        adapter: digest of its adapter; None for none.

    Attributes:
        warnings: what the receipt cannot promise; complete after `complete`.
        is_complete: whether `build` may be called once the completions have ended.
    """

    def __init__(
        self,
        weights: WeightsDigest,
        info: EngineInfo,
        *,
        deterministic: bool,
        adapter: str | None = None,
    ) -> None:
        self._adapter = adapter
        self.is_complete = False
        self._weights = weights
        self._info = info
        self._deterministic = is_deterministic(info, requested=deterministic)
        self._digest: str | None = None
        self._outputs: dict[int, ReceiptOutput] = {}  # by the id of the completion
        self._receipt: Receipt | None = None
        self.warnings: tuple[str, ...] = ()
        if not self._deterministic:
            plan = info.plan.deterministic
            advice = plan.why if plan.requests == "none" else "`deterministic` makes it so"
            self.warnings = (
                "`receipt`: the request is not deterministic, so that it may have other tokens when it is computed "
                f"again: {advice}",
            )

    async def complete(self, completions: Sequence[Completion]) -> None:
        """Wait for the digest of the weights, and compute those of completions, which have ended, in short turns."""
        if self.is_complete:
            return
        self._digest, problem = await self._weights.get()
        for completion in completions:
            self._outputs[id(completion)] = await _output(completion)
        self.is_complete = True
        if problem:
            self.warnings += (f"`receipt` has no digest of the weights: {problem}",)

    def build(self, completions: Sequence[Completion]) -> Receipt:
        """Return the receipt of some of the completions that `complete` was given."""
        if self._receipt is None:
            prompts: dict[int, int] = {}
            token_ids = []
            for completion in completions:
                if id(completion.prompt) not in prompts:
                    prompts[id(completion.prompt)] = len(prompts)
                    token_ids.append(completion.prompt.token_ids)
            self._receipt = make_receipt(
                conditions_of(self._info, self._digest, self._weights.revision, self._adapter),
                token_ids,
                [
                    (it.sampling, replace(self._outputs[id(it)], prompt=prompts[id(it.prompt)]))
                    for it in completions
                ],
                deterministic=self._deterministic,
            )
        return self._receipt


async def _output(completion: Completion) -> ReceiptOutput:
    """Return the output of a completion, with the first prompt. Tokens take 0.1 us each, so they have no turns."""
    assert completion.events is not None
    assert completion.finish_reason is not None
    # Tokens that came with the end of a stop string are not part of the answer.
    events = completion.events[: completion.num_tokens]
    tokens = [event.token_id for event in events if event.token_id is not None]
    sampling = completion.sampling
    logprobs: str | UnsetType = UNSET
    prompt_logprobs: str | UnsetType = UNSET
    if sampling.wants_logprobs:
        logprobs = await _digest((event.logprob, event.top_tokens) for event in events)
    if sampling.prompt_logprobs:
        prompt_logprobs = await _digest(
            zip(completion.prompt_logprobs[1:], completion.prompt_top_tokens[1:], strict=True)
        )
    reason = cast("Reason", REASONS[completion.finish_reason])
    return ReceiptOutput(
        prompt=0,
        token_ids=tokens,
        digest=token_digest(tokens),
        logprobs=logprobs,
        prompt_logprobs=prompt_logprobs,
        finish_reason="stop_string" if completion.after is not None else reason,
    )


async def _digest(logprobs: Iterable[Logprobs]) -> str:
    digest, left = LogprobDigest(), iter(logprobs)
    while some := list(itertools.islice(left, _AT_ONCE)):
        digest.update(some)
        await asyncio.sleep(0)
    return digest.text

"""How the engine schedules a request: fields that are the same in every dialect."""

from __future__ import annotations

import hmac
from typing import TYPE_CHECKING, Annotated, NamedTuple

from pydantic import BaseModel, ConfigDict, Field

from server.engine.core.request import MAX_DRAFT_TOKENS
from server.errors import ValidationError
from server.http.body.field_types import optional
from server.http.request_id import current_request

if TYPE_CHECKING:
    from collections.abc import Sequence

    from server.engine.core.messages import EngineInfo

MAX_PRIORITY = 2**31 - 1
MAX_TIMEOUT_MS = 24 * 3600 * 1000
MAX_SALT_CHARACTERS = 256


class RequestOptions(NamedTuple):
    """How the engine schedules a request.

    Attributes:
        priority: requests with a lower number are served first; see `KeyLimits.lowest_priority`.
        timeout_ms: time from the request's arrival until its deadline; None for no deadline but the API key's.
        cache_salt: the request shares cached prefixes only with requests of an equal salt.
        deterministic: whether its results must have the same bits whatever else the engine computes.
        max_draft_tokens, prediction: see `GenerateRequest`.
        receipt: whether the reply has a receipt.
    """

    priority: int = 0
    timeout_ms: int | None = None
    cache_salt: str | None = None
    deterministic: bool = False
    max_draft_tokens: int | None = None
    prediction: Sequence[int] = ()
    receipt: bool = False

    def salt_within(self, namespace: bytes | None) -> str | None:
        """Return the salt for the engine.

        Args:
            namespace: names the prefix caches of the request's API key; None for those that all requests share. No salt
                of a client gives that of another namespace: it is a keyed digest.
        """
        if namespace is None:
            return self.cache_salt
        if self.cache_salt is None:
            return namespace.hex()
        return hmac.digest(namespace, self.cache_salt.encode(), "sha256").hex()


class Speculation(BaseModel):
    """Whether tokens are proposed to follow those of a request, and how many at once."""

    model_config = ConfigDict(strict=True, extra="forbid")

    enabled: bool | None = optional("false: propose none. Default: true.")
    max_tokens: Annotated[int, Field(ge=0, le=MAX_DRAFT_TOKENS)] | None = optional(
        "Most tokens proposed at once; 0 for none. Default and limit: `--max-draft-tokens`."
    )

    @property
    def max_draft_tokens(self) -> int | None:
        """See `GenerateRequest`; not None if the request asks for drafts."""
        if self.enabled is False:
            return 0
        return MAX_DRAFT_TOKENS if self.enabled and self.max_tokens is None else self.max_tokens


class RequestOptionFields(BaseModel):
    """The fields of a request body that make its `RequestOptions`. Bodies of dialects inherit them."""

    priority: Annotated[int, Field(ge=-MAX_PRIORITY, le=MAX_PRIORITY)] | None = optional(
        "Requests with a lower number are served first, and preempted last: among those of one client (API key, else "
        "address), and with a number above 0 after those of other clients too. Numbers below 0 come before other "
        "clients' requests only as far as the operator allows the API key. Default: 0."
    )
    timeout_ms: Annotated[int, Field(ge=1, le=MAX_TIMEOUT_MS)] | None = optional(
        "Milliseconds from the request's arrival after which it ends: with an error if there is no "
        "token yet, otherwise with the tokens it has."
    )
    cache_salt: Annotated[str, Field(min_length=1, max_length=MAX_SALT_CHARACTERS)] | None = (
        optional(
            "The request shares cached prefixes only with requests of an equal salt, so that nobody else can "
            "find out by its speed whether a prompt was sent before."
        )
    )

    deterministic: bool | None = optional(
        "The tokens and log-probabilities have the same bits whatever else the service computes. Default: "
        "the service's setting."
    )
    speculation: Speculation | None = optional(
        "Tokens proposed to follow those of the request, where an earlier text goes on so, and computed in one step. "
        "They change the time that a reply takes and nothing else. Default: those of the service."
    )
    receipt: bool | None = optional(
        "Whether the reply has a receipt, from which `tessera replay` computes it again: the tokens of prompt and "
        "output, the parameters, and what computed them. Default: false."
    )

    def request_options(self, info: EngineInfo) -> RequestOptions:
        """Return the options, and note the deadline of the current request.

        Raises:
            ValidationError: the engine's kernels cannot compute a deterministic request, or the API key does not allow
                so long a time.
        """
        longest = current_request().limits.longest_timeout_ms
        if longest is not None and self.timeout_ms is not None and self.timeout_ms > longest:
            raise ValidationError(
                f"`timeout_ms` must be <= {longest}, the longest that the API key allows. Given: {self.timeout_ms}"
            )
        plan = info.plan.deterministic
        if self.deterministic and plan.requests == "none":
            raise ValidationError(f"`deterministic` must be false here: {plan.why}. Given: true")
        if self.timeout_ms is not None:
            request = current_request()
            request.deadline = request.arrived + self.timeout_ms / 1000
        speculation = self.speculation
        return RequestOptions(
            priority=self.priority or 0,
            timeout_ms=self.timeout_ms,
            cache_salt=self.cache_salt,
            deterministic=bool(self.deterministic),
            max_draft_tokens=None if speculation is None else speculation.max_draft_tokens,
            receipt=bool(self.receipt),
        )

"""The records of the attack list."""

from __future__ import annotations

import dataclasses
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Awaitable, Callable


@dataclasses.dataclass(frozen=True, slots=True, kw_only=True)
class Target:
    """The service under attack.

    Attributes:
        host: address that it listens on.
        port: of HTTP.
        api_key: a key that it accepts; None if it needs none.
        pid: of the command that was started; None if it was started by someone else.
    """

    host: str
    port: int
    api_key: str | None = None
    pid: int | None = None

    @property
    def url(self) -> str:
        """Address without a slash at its end."""
        return f"http://{self.host}:{self.port}"

    @property
    def headers(self) -> dict[str, str]:
        """Headers of a request that is allowed to."""
        return {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}


@dataclasses.dataclass(frozen=True, slots=True)
class Attack:
    """One attack.

    Attributes:
        id: of the list in docs/reliability.md, such as A1.
        name: what it does, as a short phrase.
        run: attacks and returns; raises AssertionError if an answer is not the promised one.
        started_mib: memory of the processes that the service starts when they are first needed.
    """

    id: str
    name: str
    run: Callable[[Target], Awaitable[None]]
    started_mib: float = 0.0

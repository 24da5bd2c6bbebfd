"""Chooses among replicas by a hash of the prompt's beginning, with bounded load.

A request goes to the replica with the highest hash of the request's key and the replica's name (rendezvous hashing:
Thaler and Ravishankar, 1998), so that equal beginnings meet in one prefix cache, and a replica that comes or goes moves
only its own share. A replica above 1.25 times the mean load is passed over (Mirrokni, Thorup and Zadimoghaddam,
"Consistent Hashing with Bounded Loads", 2016). Nothing is remembered but the requests of the last seconds, so that
several routers agree. Pure Python, without Ray.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections import deque
from collections.abc import Mapping
from typing import Any, Final

KEY_CHARACTERS: Final = 512
MAX_LOAD: Final = 1.25
"""Times the mean load that a replica may have."""
_PROMPT_FIELDS: Final = ("inputs", "prompt", "messages", "input")


def routing_key(body: bytes) -> str:
    """Return the beginning of a request's prompt; of the body, if the prompt is not found; empty without a body.

    Args:
        body: of a request of any of the service's routes, perhaps cut off.
    """
    try:
        request = json.loads(body)
    except ValueError:
        # Cut off, or not JSON: the service answers, or another part of the body is the same.
        return body.decode(errors="replace")[:KEY_CHARACTERS]
    prompt = _prompt(request) if isinstance(request, dict) else None
    text = prompt if isinstance(prompt, str) else json.dumps(prompt or request)
    return text[:KEY_CHARACTERS]


def ranked(key: str, loads: Mapping[str, float]) -> list[str]:
    """Return the names of all replicas, the best one for a request first.

    Args:
        key: of the request; if it is empty, the load alone decides.
        loads: sequences of each replica by name.
    """
    if not key:
        return sorted(loads, key=lambda name: (loads[name], name))
    by_hash = sorted(loads, key=lambda name: _score(key, name), reverse=True)
    # With the request itself, so that an idle service has room on each replica.
    bound = math.ceil(MAX_LOAD * (sum(loads.values()) + 1) / max(1, len(loads)))
    return sorted(by_hash, key=lambda name: loads[name] >= bound)  # stable


class RecentRequests:
    """How many requests were sent to each replica within the last seconds.

    A replica's own report is some seconds old; what was sent since is added to it.

    Args:
        seconds: how long a request counts.
    """

    def __init__(self, seconds: float) -> None:
        self._seconds = seconds
        self._times: dict[str, deque[float]] = {}

    def add(self, name: str, now: float) -> None:
        """Count a request.

        Args:
            name: of the replica.
            now: time in seconds, of any clock that does not go backwards.
        """
        self._times.setdefault(name, deque()).append(now)

    def count(self, name: str, now: float) -> int:
        """Return how many requests count for a replica at a time."""
        times = self._times.get(name)
        while times and times[0] <= now - self._seconds:
            times.popleft()
        return len(times or ())

    def keep(self, names: Mapping[str, object]) -> None:
        """Forget all other replicas."""
        for name in self._times.keys() - names.keys():
            del self._times[name]


def _prompt(request: dict[str, Any]) -> object:
    return next((request[field] for field in _PROMPT_FIELDS if request.get(field)), None)


def _score(key: str, name: str) -> bytes:
    return hashlib.blake2b(f"{name}\0{key}".encode(errors="replace"), digest_size=8).digest()

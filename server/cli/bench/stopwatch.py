"""Times functions of other modules. The time of a function excludes the timed functions that it calls.

A `with` statement replaces the functions by timed ones and restores them at its end.
"""

from __future__ import annotations

import contextlib
import functools
import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TypeAlias

Timed: TypeAlias = tuple[str, Any, str]
"""(name of the phase, module or class, name of the function in it)."""


class Stopwatch:
    """Sums seconds by phase, in one thread.

    Attributes:
        seconds: of each phase, without nested phases.
    """

    def __init__(self) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._inner = 0.0

    @contextlib.contextmanager
    def timing(self, functions: Sequence[Timed]) -> Iterator[None]:
        """Time these functions until the end of the block.

        Raises:
            AttributeError: one of them does not exist.
        """
        with contextlib.ExitStack() as stack:
            for phase, owner, name in functions:
                original = getattr(owner, name)
                stack.callback(_restore, owner, name, vars(owner).get(name, _INHERITED))
                setattr(owner, name, self._timed(phase, original))
            yield

    def _timed(self, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
        clock = time.perf_counter

        @functools.wraps(function)
        def timed(*arguments: Any, **keywords: Any) -> Any:  # noqa: ANN401
            outer, self._inner = self._inner, 0.0
            start = clock()
            try:
                return function(*arguments, **keywords)
            finally:
                seconds = clock() - start
                self.seconds[phase] += seconds - self._inner
                self._inner = outer + seconds

        return timed


_INHERITED = object()


def _restore(owner: Any, name: str, value: Any) -> None:  # noqa: ANN401
    if value is _INHERITED:
        delattr(owner, name)
    else:
        setattr(owner, name, value)

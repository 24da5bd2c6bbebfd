"""Logging of both processes in one readable format, on standard error. Knows nothing of what is logged."""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

LEVELS = ("debug", "info", "warning", "error")


def configure_logging(level: str) -> None:
    """Send every logger of this process to standard error.

    Args:
        level: one of `LEVELS`.
    """
    logging.basicConfig(
        level=level.upper(),
        stream=sys.stderr,
        format="%(asctime)s %(levelname)-7s %(name)-14s %(message)s",
        datefmt="%H:%M:%S",
        force=True,
    )
    for chatty in ("httpx", "httpcore", "huggingface_hub", "filelock"):
        logging.getLogger(chatty).setLevel(logging.WARNING)


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Iterator[None]:
    """Record in `seconds[name]` how long the block took, in seconds."""
    start = time.perf_counter()
    try:
        yield
    finally:
        seconds[name] = time.perf_counter() - start

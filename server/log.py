"""Logging of both processes in one readable format, on standard error. Knows nothing of what is logged."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """Send every logger of this process to standard error.

    Args:
        level: name of a logging level.
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

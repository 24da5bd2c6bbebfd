"""Log format of all processes of the service."""

from __future__ import annotations

import logging
import sys


def configure_logging(level: str) -> None:
    """Write the log messages of this process to standard error.

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

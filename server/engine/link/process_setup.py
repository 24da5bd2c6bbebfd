"""What a process does before and after its start, so that nothing disturbs the steps or the streams."""

from __future__ import annotations

import contextlib
import gc
import os
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Iterator


def quiet_idle_threads() -> None:
    """Let OpenMP's idle threads sleep; to be called before PyTorch is imported.

    They spin by default; beside any other load they then take the core that the working thread
    needs: 30 ms a token instead of 4 on two cores with two busy neighbours.
    """
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")


def tokenize_in_our_threads() -> None:
    """Have the tokenizer's library work in the thread that calls it; to be called before any text is tokenized.

    It hands even a lone text to a pool of its own, and the caller waits for two threads to wake up.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


@contextlib.contextmanager
def without_collections() -> Iterator[None]:
    """Spare the garbage collector what is imported inside, and the import the collector.

    It would pass over all of that again and again and find nothing: a sixth of the time that PyTorch takes.
    """
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


def keep_what_is_there() -> None:
    """Spare the garbage collector what start-up made, which lives for ever."""
    gc.collect()
    gc.freeze()

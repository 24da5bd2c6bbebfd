"""Errors of the tokenizers library, which is written in Rust and follows what a file of a checkpoint says."""

from __future__ import annotations

from model.errors import TokenizerError


def library_error(error: BaseException, what: str) -> TokenizerError:
    """Make an error for the user of one that the library raised.

    The library raises bare `Exception`, and for a panic a class that cannot be imported and does not derive from
    `Exception`, so that it would end the thread of whoever does not expect it.

    Args:
        error: what the library raised. Any other `BaseException`, such as an interrupt, is raised again; so is a lack
            of memory, which says nothing about the input.
        what: what failed.
    """
    if isinstance(error, MemoryError):
        raise error
    if not isinstance(error, Exception) and type(error).__name__ != "PanicException":
        raise error
    return TokenizerError(f"{what}: {error}")

"""Makes instructions and answers from documented functions: what the docstring says, and the function."""

from __future__ import annotations

import ast
from collections.abc import Iterable, Iterator

import numpy as np

from model.training.tokenization import chat_turn

_REQUESTS = (
    "Write a Python function `{signature}`. {purpose}",
    "Implement `{signature}`: {purpose}",
    "Write the function `{name}`. {purpose}",
    "{purpose} Call the function `{name}`.",
    "{purpose}",
)
_MAX_CHARACTERS = 4_000
_MIN_PURPOSE = 12


def instruction_documents(fragments: Iterable[str], seed: int) -> Iterator[str]:
    """Yield a conversation of one instruction and its answer for each documented function.

    Args:
        fragments: dedented source; what is not one function with a docstring is left out.
        seed: chooses the wording.
    """
    generator = np.random.default_rng(seed)
    for fragment in fragments:
        found = instruction(fragment, generator)
        if found is not None:
            yield chat_turn("user", found) + chat_turn("assistant", fragment.rstrip("\n"))


def instruction(fragment: str, generator: np.random.Generator) -> str | None:
    """Return the instruction that a function answers; None if it is not a short function with a docstring."""
    if not fragment.startswith("def ") or len(fragment) > _MAX_CHARACTERS:
        return None
    try:
        node = ast.parse(fragment).body[0]
    except SyntaxError:
        # A fragment can lack lines of its body, for example those that are in an earlier version.
        return None
    assert isinstance(node, ast.FunctionDef)
    purpose = " ".join((ast.get_docstring(node) or "").partition("\n\n")[0].split())
    if len(purpose) < _MIN_PURPOSE:
        return None
    if purpose[-1] not in ".!?:":
        purpose += "."
    request = _REQUESTS[int(generator.integers(len(_REQUESTS)))]
    return request.format(
        signature=f"{node.name}({ast.unparse(node.args)})", name=node.name, purpose=purpose
    )

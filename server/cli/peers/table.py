"""Finds the answers of the tables to a name."""

from __future__ import annotations

import functools
import re
from typing import Final, NamedTuple

from server.cli.peers.answers import Peer, Row
from server.cli.peers.llama_cpp import LLAMA_CPP
from server.cli.peers.ollama import OLLAMA
from server.cli.peers.sglang import SGLANG
from server.cli.peers.tgi import TGI
from server.cli.peers.vllm import VLLM

PEERS: Final = (VLLM, TGI, LLAMA_CPP, SGLANG, OLLAMA)
_LEVEL: Final = re.compile(r"-O[0-9]?")


class Found(NamedTuple):
    """A row that a name belongs to.

    Attributes:
        peer: whose name it is.
        row: the answer.
        negated: whether the name is `--no-` and that of a row of true or false.
    """

    peer: Peer
    row: Row
    negated: bool = False


def find_flag(name: str) -> list[Found]:
    """Return the rows that a flag belongs to, of each peer at most one; empty if no peer has it.

    Underscores count as hyphens, `--config.key` is `--config`, `-cc.key` is `-cc`, and `-O3` is `-O`, as in vLLM.
    """
    if name in _flags():
        return _flags()[name]
    name = name.partition(".")[0]
    if name.startswith("--"):
        name = name.replace("_", "-")
    elif _LEVEL.fullmatch(name):
        name = "-O"
    if found := _flags().get(name):
        return found
    if not name.startswith("--no-"):
        return []
    return [
        it._replace(negated=True)
        for it in _flags().get(f"--{name[5:]}", ())
        if it.row.takes != "value"
    ]


def find_variable(name: str) -> Found | None:
    """Return the row that an environment variable belongs to; None if no peer has it."""
    return _variables().get(name)


@functools.cache
def _flags() -> dict[str, list[Found]]:
    table: dict[str, list[Found]] = {}
    for peer in PEERS:
        for row in peer.rows:
            for name in row.flags.split():
                table.setdefault(name, []).append(Found(peer, row))
    return table


@functools.cache
def _variables() -> dict[str, Found]:
    return {
        name: Found(peer, row)
        for peer in PEERS
        for row in peer.rows
        for name in row.variables.split()
    }

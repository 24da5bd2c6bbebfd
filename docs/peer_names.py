"""Renders docs/peer-names.md from the tables of `server.cli.peers`."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from server.cli.peers.answers import Peer, Row
from server.cli.peers.reading import absence
from server.cli.peers.table import PEERS, Found
from server.cli.peers.values import SPELLINGS
from server.cli.settings import flag, listed_settings

_HEAD = """\
# Names of other servers

Generated from `server/cli/peers/` by `make docs`. It lists the flags and environment variables of vLLM (0.25 to 0.33),
Text Generation Inference (3.3), llama.cpp's `llama-server` (autumn 2026), SGLang (0.5.10 to 0.5.23) and Ollama (summer
2026), and what Tessera does with each. Flags work in every command with settings, and without their hyphens as keys
of a `--config` file. What was understood or has no effect is logged in one line.

- **Understood**: the meaning is that of a setting of Tessera, which is set.
- **Without effect**: what it asks for is so anyway. With another value than those listed it is an error.
- **Answered**: an error, with the name of what is near. A variable is logged and has no effect.
- **Not in Tessera**: an error that says so. A variable is logged and has no effect, except that variables of Text
  Generation Inference and llama.cpp are errors too where ignoring them would change answers or security (marked !).

`--no-` before a flag of true or false is its opposite. A flag that means different things in two servers is understood
if the other flags of the command line belong to one of them, and is an error otherwise. Of `--config` and variables,
`docs/command-line.md` says which override which. `TESSERA_PEER_ENV=0` ignores the variables of all these servers.
"""


def peer_names_page() -> str:
    """Return docs/peer-names.md."""
    parts = [_HEAD, "## Side by side\n", _side_by_side(), "## Values\n", _values()]
    for peer in PEERS:
        parts += [f"## {peer.name}\n", *_tables(peer)]
    return "\n".join(parts).rstrip() + "\n"


def _side_by_side() -> str:
    lines = _head("Tessera", *(peer.name for peer in PEERS if peer.name != "Ollama"))
    for name in listed_settings():
        cells = [
            ", ".join(
                code
                for row in peer.rows
                if row.setting == name
                for code in (_names(row.flags), _names(row.variables))
                if code
            )
            for peer in PEERS
            if peer.name != "Ollama"
        ]
        if any(cells):
            lines.append(_line(f"`{flag(name)}`", *cells))
    return "\n".join(lines) + "\n"


def _values() -> str:
    lines = _head("setting", "value", "is")
    for name, spellings in SPELLINGS.items():
        lines += [_line(f"`{flag(name)}`", f"`{it}`", f"`{own}`") for it, own in spellings.items()]
    lines.append(
        _line("numbers of tokens, bytes, requests and sequences", "`4k`, `4K`, `1m`, `1M`",
              "4000, 4096, 1000000, 1048576; `25.6k` is 25600")
    )  # fmt: skip
    return "\n".join(lines) + "\n"


def _tables(peer: Peer) -> Iterable[str]:
    kinds: tuple[tuple[str, str, Callable[[Row], str]], ...] = (
        ("Understood", "as", lambda row: row.setting and f"`{flag(row.setting)}`"),
        ("Without effect", "because", _reason),
        ("Answered", "with", lambda row: row.near),
        ("Not in Tessera", "answer", lambda row: _absence(peer, row)),
    )
    for title, column, text in kinds:
        rows = [row for row in peer.rows if text(row)]
        if not rows:
            continue
        lines = [f"**{title}**", "", *_head("flags", "variables", column)]
        lines += [_line(_names(row.flags), _names(row.variables), text(row)) for row in rows]
        yield "\n".join(lines) + "\n"


def _reason(row: Row) -> str:
    only = ", ".join(f"`{text}`" for text in row.only.split())
    return row.always and row.always + (f" (only {only})" if only else "")


def _absence(peer: Peer, row: Row) -> str:
    mark = "! " if peer.variables_are_flags and row.subject and row.subject.matters else ""
    return mark + absence(Found(peer, row)) if row.subject else ""


def _names(names: str) -> str:
    return " ".join(f"`{name}`" for name in names.split())


def _head(*columns: str) -> list[str]:
    return [_line(*columns), "|" + "---|" * len(columns)]


def _line(*cells: str) -> str:
    return f"| {' | '.join(cells)} |"

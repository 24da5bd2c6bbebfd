"""The processes of a running service, as /proc shows them: their roles, memory and file descriptors."""

from __future__ import annotations

import contextlib
import enum
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

if TYPE_CHECKING:
    from collections.abc import Iterable

_PROC = Path("/proc")


class Role(enum.Enum):
    """What a process of the service does."""

    PARENT = "parent"
    ENGINE = "engine"
    FRONT_END = "front end"
    GRAMMAR_WORKER = "grammar worker"
    OTHER = "other"


# By a part of the command line.
_ROLES = (
    (b"engine_process.process", Role.ENGINE),
    (b"fake_engine", Role.ENGINE),
    (b"server.cli.front_end.process", Role.FRONT_END),
    (b"server.http.text.grammar_worker", Role.GRAMMAR_WORKER),
)


class Process(NamedTuple):
    """One process of a service."""

    pid: int
    role: Role


def process_tree(root: int) -> list[Process]:
    """List a service's processes, the parent first; processes that end meanwhile may be missing."""
    found = [Process(root, Role.PARENT)] if (_PROC / str(root)).exists() else []
    for process in found:  # grows while it is iterated over
        for file in (_PROC / str(process.pid) / "task").glob("*/children"):
            with contextlib.suppress(OSError):
                found += [Process(pid, _role(pid)) for pid in map(int, file.read_text().split())]
    return found


def _role(pid: int) -> Role:
    with contextlib.suppress(OSError):
        command = (_PROC / str(pid) / "cmdline").read_bytes()
        return next((role for part, role in _ROLES if part in command), Role.OTHER)
    return Role.OTHER


def anonymous_bytes(pids: Iterable[int]) -> int:
    """Sum the processes' anonymous memory, in RAM and swapped out: what their own data takes.

    Unlike the resident set it contains no pages of mapped files, which come and go with the page cache, and it does not
    shrink when the system swaps.
    """
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            for line in (_PROC / str(pid) / "status").read_text().splitlines():
                if line.startswith(("RssAnon:", "VmSwap:")):
                    total += int(line.split()[1]) * 1024
    return total


def open_descriptors(pids: Iterable[int]) -> int:
    """Count the processes' file descriptors."""
    total = 0
    for pid in pids:
        with contextlib.suppress(OSError):
            total += sum(1 for _ in (_PROC / str(pid) / "fd").iterdir())
    return total


def socket_inodes(pids: Iterable[int]) -> set[str]:
    """Return the inodes of the sockets that the processes have open."""
    inodes = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for file in (_PROC / str(pid) / "fd").iterdir():
                with contextlib.suppress(OSError):
                    inodes.add(str(file.readlink()).removeprefix("socket:[").removesuffix("]"))
    return inodes


def reachable_sockets(pids: Iterable[int]) -> set[str]:
    """Return the sockets of the processes that another process can connect or send to.

    Returns:
        `tcp PORT` and `udp PORT`, on any address, IPv4 and IPv6; and `unix NAME`, with an @ in front if it is abstract.
    """
    inodes = socket_inodes(pids)
    found = set()
    for table, is_reachable in (("tcp", "0A".__eq__), ("udp", bool)):
        for fields in (*_net(table), *_net(f"{table}6")):
            if fields[9] in inodes and is_reachable(fields[3]):
                found.add(f"{table} {int(fields[1].rsplit(':', 1)[1], 16)}")
    return found | {f"unix {it[7]}" for it in _net("unix") if it[6] in inodes and len(it) > 7}


def _net(table: str) -> list[list[str]]:
    with contextlib.suppress(OSError):
        return [line.split() for line in (_PROC / "net" / table).read_text().splitlines()[1:]]
    return []

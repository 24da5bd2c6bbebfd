"""Finds instructions of a loop that touch registers of a WGMMA before the wait for it, in SASS.

A product that has been issued reads its first operand and writes its accumulator until `WARPGROUP.DEPBAR` says that it
has ended. The compiler knows that; this holds it to it.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, field

_INSTRUCTION = re.compile(r"^\s+/\*[0-9a-f]+\*/\s+(?:@!?U?P\d+\s+)?(.*?)\s*;")
_LABEL = re.compile(r"^\s*(\.L_x_\d+):")
_BRANCH = re.compile(r"BRA `\((\.L_x_\d+)\)")
_PRODUCT = re.compile(r"HGMMA\.64x(\d+)x16\S*\s+R(\d+), (?:R(\d+))?")
_WAIT = re.compile(r"WARPGROUP\.DEPBAR\.LE gsb0, (0x[0-9a-f]+)")
_READS_ONLY = ("ST", "RED", "ISETP", "FSETP", "R2UR", "BRA", "BAR", "SYNCS")
_WIDTHS = {".128": 4, "F32x4": 4, "M88.4": 4, ".64": 2, "WIDE": 2}


@dataclass
class _Group:
    """Registers of products that end together."""

    results: set[int] = field(default_factory=set)
    operands: set[int] = field(default_factory=set)


def loop_with_products(sass: str) -> list[str]:
    """Return the instructions from the label that the first branch after the last product goes back to."""
    code: list[str] = []
    labels: dict[str, int] = {}
    for line in sass.splitlines():
        if label := _LABEL.match(line):
            labels[label[1]] = len(code)
        elif instruction := _INSTRUCTION.match(line):
            code.append(instruction[1])
    products = [i for i, it in enumerate(code) if it.startswith("HGMMA")]
    for i in range(products[-1], len(code)):
        branch = _BRANCH.search(code[i])
        if branch and labels[branch[1]] <= products[0]:
            return code[labels[branch[1]] : i + 1]
    raise AssertionError("no loop around the products")


def faults(sass: str) -> list[str]:
    """List the instructions that read or write a result, or write an operand, of a product in flight."""
    found: list[str] = []
    pending: list[_Group] = []
    group = _Group()
    loop = loop_with_products(sass)
    for instruction in loop + loop:
        if product := _PRODUCT.match(instruction):
            columns, result, operand = product.groups()
            mine = set(range(int(result), int(result) + int(columns) // 2))
            others = [it for it in pending if (it.results | it.operands) & mine]
            found += [instruction for it in others if not mine <= it.results]
            group.results |= mine
            group.operands |= _registers(operand, 4)
            if "gsb0" in instruction:
                pending.append(group)
                group = _Group()
        elif wait := _WAIT.match(instruction):
            left = int(wait[1], 16)
            pending = pending[len(pending) - left :] if left else []
        else:
            reads, writes = _touched(instruction)
            for it in (*pending, group):
                if (reads | writes) & it.results or writes & it.operands:
                    found.append(instruction)
    return found


def _registers(first: str | None, count: int) -> set[int]:
    return set(range(int(first), int(first) + count)) if first else set()


def _touched(instruction: str) -> tuple[set[int], set[int]]:
    """Return the registers that an instruction reads and writes; a wide one takes its first or last several ones."""
    name, _, operands = instruction.partition(" ")
    width = next((size for mark, size in _WIDTHS.items() if mark in name), 1)
    named = re.findall(r"\bR(\d+)(\.64)?", operands)
    reads = {number for it, wide in named for number in _registers(it, 2 if wide else 1)}
    if not named:
        return reads, set()
    if name.startswith(_READS_ONLY):
        return reads | _registers(named[-1][0], width), set()
    return reads, _registers(named[0][0], width)

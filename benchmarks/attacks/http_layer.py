"""Attacks on connections, framing and headers."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from benchmarks.attacks.record import Attack

ATTACKS: list[Attack] = []

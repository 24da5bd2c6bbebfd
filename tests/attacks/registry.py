"""All attacks. A module of attacks has a list `ATTACKS`, which is added here."""

from __future__ import annotations

from typing import TYPE_CHECKING

from tests.attacks import auth, http_layer, load, parameters

if TYPE_CHECKING:
    from tests.attacks.record import Attack

ATTACKS: list[Attack] = [
    *http_layer.ATTACKS,
    *parameters.ATTACKS,
    *load.ATTACKS,
    *auth.ATTACKS,
]
"""In the order in which they run."""

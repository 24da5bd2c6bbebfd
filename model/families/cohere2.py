"""Command R7B and later: as Command R; three of four layers have a window, and the others no rotary embedding."""

from __future__ import annotations

from typing import Final

from model.families import parts
from model.families.cohere import TENSORS, parallel_layer, rewrites
from model.families.family import Family
from model.families.keys import Keys
from model.families.rotary import read_rotary
from model.network.spec import Network


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    layer = parallel_layer(keys, rotary=None)
    local = read_rotary(keys, layer.mixer.head_dim)
    layers = parts.with_windows(layer, parts.windows_by_pattern(keys, 4), local)
    return parts.decoder(keys, layers, layer.norm, tied=True)


FAMILY: Final = Family("Cohere2ForCausalLM", "cohere2", network, TENSORS, rewrites)

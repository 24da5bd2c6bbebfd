"""OLMo 3: OLMo 2 with windows in three of four layers; only the others extend the context."""

from __future__ import annotations

import dataclasses
from typing import Final

from model.families import olmo2, parts
from model.families.keys import Keys
from model.families.rotary import read_rotary_by_layer_type
from model.network.spec import Network

_THETA: Final = 500_000.0


def network(keys: Keys) -> Network:
    """Return the network of a config.json."""
    full, local = read_rotary_by_layer_type(keys, parts.heads(keys)[2], (_THETA, None))
    layer = olmo2.layer(keys, full)
    return parts.decoder(
        keys, parts.with_windows(layer, parts.windows_by_pattern(keys, 4), local), layer.norm
    )


FAMILY: Final = dataclasses.replace(
    olmo2.FAMILY, architecture="Olmo3ForCausalLM", model_type="olmo3", network=network
)

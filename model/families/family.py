"""The record of a family, the row of `model.families.table`."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any, Final

from model.families.keys import Keys
from model.families.tensors import LLAMA, Rewrite, Tensors
from model.families.wrapped import tied_by_the_model
from model.json_input import check
from model.network.spec import Network

_TIED: Final = "tie_word_embeddings"


def _unchanged(_: Keys) -> Mapping[str, Any]:
    return {}


@dataclasses.dataclass(frozen=True)
class Family:
    """The checkpoints of one architecture.

    Attributes:
        architecture: the entry of `architectures` in config.json.
        model_type: the value of the key `model_type`.
        network: returns the network that a config.json states. Keys of unsupported features that it does not read
            are refused by name. It reads absent keys as the family's configuration class in transformers, because files
            omit values that equal the defaults there.
        tensors: names of the tensors, and how they are stored.
        rewrites: returns what loading changes, by the names of modules in `model.families.tensors`.
        renamed: as for `Keys`.
        part: the key of the object that states the language model, of a config.json of several models; "" if it is
            config.json itself. Files without the object state the language model beside the other models.
        defaults: values of absent keys that have no default in `network`, or another one. A key of null is not absent.
        also: other entries of `architectures` that files with this `model_type` have.
        synonyms: other names of keys in some files, and those that `network` reads.
        tied: whether the head is tied, from what config.json and `part` state; of a family with a part.
        stated_modules: returns names that replace those of `Tensors.layer_modules` where a config.json says so.
    """

    architecture: str
    model_type: str
    network: Callable[[Keys], Network]
    tensors: Tensors = LLAMA
    rewrites: Callable[[Keys], Mapping[str, Rewrite]] = _unchanged
    renamed: Mapping[str, str] = dataclasses.field(default_factory=dict)
    part: str = ""
    defaults: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    also: tuple[str, ...] = ()
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    tied: Callable[[bool | None, bool | None], bool | None] = tied_by_the_model
    stated_modules: Callable[[Keys], Mapping[str, str]] = _unchanged

    def keys(self, config: Mapping[str, Any]) -> Keys:
        """Return the keys of the language model that a config.json states."""
        if not self.part:
            return Keys({**self.defaults, **self._translated(config)}, self.renamed)
        stated = config.get(self.part)
        if stated is None:
            return Keys({**self.defaults, **config}, self.renamed)
        part = {**self.defaults, **check(stated, dict, self.part)}
        # transformers 5 states it beside the part, earlier releases in it.
        part[_TIED] = self.tied(
            *(check(it.get(_TIED), bool | None, _TIED) for it in (config, part))
        )
        return Keys(part, self.renamed, f"{self.part}.")

    def tensors_of(self, keys: Keys) -> Tensors:
        """Return the tensors of a checkpoint whose config.json has these keys."""
        names = {**self.tensors.layer_modules, **self.stated_modules(keys)}
        return dataclasses.replace(self.tensors, layer_modules=names)

    def _translated(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Return the keys by the names that `network` reads, which prevail where a file has both."""
        others = {self.synonyms[key]: it for key, it in config.items() if key in self.synonyms}
        return {**others, **{key: it for key, it in config.items() if key not in self.synonyms}}

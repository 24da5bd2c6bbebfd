"""Maps the names of tensors in files to those of a model, and says what other names are.

Programs that save a model put the names of the modules that contain it before those of its tensors: a multimodal model
that of its language model, `torch.compile`, FSDP and DataParallel theirs.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from enum import Enum, auto
from typing import Final, TypeVar

from model.errors import WeightsError
from model.families.tensors import Tensors

T = TypeVar("T")

_WRAPPER: Final = re.compile(
    r"(?:^|(?<=\.))(?:_orig_mod|_fsdp_wrapped_module|_checkpoint_wrapped_module)\.|^(?:module\.)+"
)
"""Components of names that `torch.compile`, FSDP, checkpointing of activations and DataParallel add."""
_CONTAINERS: Final = frozenset(
    (
        "model", "base_model", "language_model", "text_model", "transformer", "decoder", "gpt_neox", "llm", "lm",
        "module", "backbone",
    )
)  # fmt: skip
"""First components of names, those of modules that contain a language model."""
_PEFT: Final = re.compile(
    r"(^|\.)(lora_(A|B|embedding_A|embedding_B|magnitude_vector)|base_layer|modules_to_save|original_module|"
    r"(ia3_l|vera_lambda_[bd]|oft_r|hada_w\d_[ab]|lokr_w\d)(_\w+)?)(\.|$)"
)
_HINTS: Final = (
    (
        re.compile(r"(^|\.)tok_embeddings\.|\.attention\.w[qkvo]\.|\.feed_forward\.w[123]\."),
        "names such as {0} are those of the original format of Meta and Mistral: serve the checkpoint in the format of"
        " transformers, which has a model.safetensors",
    ),
    (
        re.compile(r"^blk\.\d+\.|^token_embd\."),
        "names such as {0} are those of GGUF files: serve the .gguf file",
    ),
    (
        re.compile(r"^(model\.diffusion_model|first_stage_model|cond_stage_model)\."),
        "names such as {0} are those of a model that generates images",
    ),
    (
        re.compile(r"(^|\.)encoder\.layer\.\d+\."),
        "names such as {0} are those of an encoder, which generates no text",
    ),
    (
        re.compile(r"(^|\.)(block_sparse_moe|experts)\."),
        "names such as {0} are those of a mixture of experts, which is not supported",
    ),
)
"""What names belong to that no family has, and what to do."""
_CACHE_SCALE: Final = re.compile(
    r"(^|\.)((q|k|v|kv|key|value|prob|prob_output)_(scale|zero_point)|kv_cache_scaling_factor)$"
    r"|\.(k_proj|v_proj|qkv_proj)\.output_scale$"
)
_ROTARY: Final = re.compile(r"(^|\.)\w*inv_freq$")
_MASK: Final = re.compile(r"(^|\.)(attn|attention|self_attn|self_attention)\.bias$")
_POSITIONS: Final = re.compile(r"(^|\.)position_ids$")
_OTHER_BUFFER: Final = re.compile(
    r"(^|\.)(rotary_emb|rotary_pos_emb)\.|(^|\.)_?(cos|sin|cos_sin)_(cache|cached|table)$|(^|\.)freqs_cis$|"
    r"(^|\.)rope\.freqs$|(^|\.)(attn|attention|self_attn|self_attention)\.(masked_bias|causal_mask)$|"
    r"(^|\.)(causal_mask|_extra_state|num_batches_tracked)$"
)


class Buffer(Enum):
    """What a stored tensor is that no parameter holds."""

    ROTARY = auto()
    """Radians by which pairs of dimensions rotate per position."""
    MASK = auto()
    """A causal mask."""
    POSITIONS = auto()
    """The numbers of positions."""
    CACHE_SCALE = auto()
    """A scale of a KV cache in FP8."""
    OTHER = auto()
    """One that follows from another, or from nothing that changes the result."""


_KINDS: Final = (
    (_ROTARY, Buffer.ROTARY), (_MASK, Buffer.MASK), (_POSITIONS, Buffer.POSITIONS),
    (_CACHE_SCALE, Buffer.CACHE_SCALE), (_OTHER_BUFFER, Buffer.OTHER),
)  # fmt: skip


class StoredNames:
    """The names of one model's tensors, to which those in files are mapped.

    Args:
        tensors: of the family.
        needed: the names of the model's tensors.
        num_layers: of the model.
    """

    def __init__(self, tensors: Tensors, needed: Iterable[str], num_layers: int) -> None:
        self._tensors, self._num_layers = tensors, num_layers
        self._containers = _CONTAINERS | set(tensors.prefix.split("."))
        self._modules = {self._inner(it): it for it in (_module(name) for name in needed)}
        self._layer = re.compile(rf"{re.escape(tensors.layers)}(\d+)\.")

    def add(self, name: str) -> None:
        """Add a name of a tensor that the model may have."""
        self._modules[self._inner(_module(name))] = _module(name)

    def mapped(self, parts: Mapping[str, T]) -> dict[str, T]:
        """Return what has names of files by the names in the model.

        Raises:
            WeightsError: two names stand for one tensor.
        """
        by_name: dict[str, str] = {}
        for name in parts:
            full = self.full(name)
            if (other := by_name.setdefault(full, name)) != name:
                raise WeightsError(f"the files have {full} twice, as {other} and {name}")
        return {full: parts[name] for full, name in by_name.items()}

    def full(self, name: str) -> str:
        """Return the name that a tensor in a file has in the model; of one that the model lacks the plain name."""
        plain = self._without_layer_alias(_WRAPPER.sub("", name))
        module = self._modules.get(self._inner(_module(plain)))
        if module is not None:
            return f"{module}.{plain.rpartition('.')[2]}"
        if plain.startswith(self._tensors.ignored):
            return plain
        for alias, prefix in self._tensors.aliases.items():
            if plain.startswith(alias):
                return prefix + plain.removeprefix(alias)
        return plain

    def is_ignored(self, name: str) -> bool:
        """Whether a tensor belongs to another model of the checkpoint, such as an image encoder."""
        return self.full(name).startswith(self._tensors.ignored)

    def is_beyond_layers(self, name: str) -> bool:
        """Whether a tensor belongs to a layer after the last one of the model."""
        found = self._layer.match(self._inner(_WRAPPER.sub("", name)))
        return found is not None and int(found[1]) >= self._num_layers

    def buffer(self, name: str, shape: tuple[int, ...]) -> Buffer | None:
        """Return what a tensor is that no parameter holds; None for any other."""
        plain = _WRAPPER.sub("", name)
        if plain.rpartition(".")[2] in ("weight", "bias") and self._modules.get(
            self._inner(_module(plain))
        ):
            return None
        kind = next((kind for pattern, kind in _KINDS if pattern.search(plain)), None)
        return None if kind is Buffer.MASK and len(shape) < 2 else kind

    def _without_layer_alias(self, name: str) -> str:
        start, layers, rest = name.partition(self._tensors.layers)
        index, _, module = rest.partition(".")
        if index.isdigit():
            for alias, meant in self._tensors.layer_aliases.items():
                if module.startswith(f"{alias}."):
                    return f"{start}{layers}{index}.{meant}{module.removeprefix(alias)}"
        return name

    def _inner(self, name: str) -> str:
        """Return a name without those of the modules that contain the language model."""
        first, _, rest = name.partition(".")
        while rest and first in self._containers:
            name = rest
            first, _, rest = name.partition(".")
        return name


def hint(names: Iterable[str]) -> str:
    """Return what a checkpoint with these unexpected names is, and what to do; the end of a sentence, or empty."""
    listed = sorted(names)
    for pattern, text in _HINTS:
        if found := next(filter(pattern.search, listed), None):
            return "; " + text.format(found)
    return ""


def check_merged(names: Iterable[str]) -> None:
    """Check that a checkpoint has no tensors of an adapter beside those of the model.

    Raises:
        WeightsError: it has.
    """
    if found := next(filter(_PEFT.search, names), None):
        raise WeightsError(
            f"{found} belongs to an adapter of PEFT that is not merged into the weights: load the model with peft, call"
            " merge_and_unload(), save the result with save_pretrained and serve that"
        )


def _module(name: str) -> str:
    return name.rpartition(".")[0]

"""The functions that modules of `transformers` call for attention and masks, and the probe that states their network.

A model whose class has `_supports_attention_backend` calls a registered function for the attention of each layer. The
probe runs a few tokens through modules without memory and records the calls. What attention would not read, or would
read otherwise, is refused by name, so that there is no list of models that work.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any, Final, NamedTuple, Protocol, TypeAlias

import torch

from model.errors import UnsupportedModelError
from model.families.unlisted import NAME
from model.network.spec import Attention, Dense, Layer

if TYPE_CHECKING:
    from torch import Tensor, nn

STEPS: Final = "tessera_steps"
PROBE: Final = "tessera_probe"
"""Our names among the implementations of attention: without masks for steps, with masks that tell what they are."""

_MOST_TOKENS: Final = 16_384
"""Of the probe, which computes no numbers: what modules do only with long texts is seen too."""
_NO_EFFECT: Final = frozenset((
    "position_ids", "cache_position", "output_attentions", "output_hidden_states", "output_router_logits",
    "return_dict", "use_cache", "logits_to_keep", "position_embeddings", "layer_idx", "num_items_in_batch",
    "input_ids", "inputs_embeds",
))  # fmt: skip
"""Arguments that modules pass on to attention and that do not change it; None has no effect in any other."""
_MASK: Final = "_tessera_mask"


class AttentionCall(NamedTuple):
    """A call of the function for attention.

    Attributes:
        module: that calls.
        query: [1, H, T, D].
        key: [1, K, T, D].
        value: [1, K, T, D].
        mask: from the function for masks, or what the module has in its place.
        scaling: factor on the scores; None for D^-0.5.
        others: the other arguments by name.
    """

    module: nn.Module
    query: Tensor
    key: Tensor
    value: Tensor
    mask: Any
    scaling: float | None
    others: dict[str, Any]


Receiver: TypeAlias = Callable[[AttentionCall], "Tensor"]
"""Computes the attention of a call, [1, T, H, D]."""
_receiver: ContextVar[Receiver] = ContextVar("receiver of attention")


@contextmanager
def receiving(receiver: Receiver) -> Iterator[None]:
    """Let a receiver compute the attention of the modules that run in this context."""
    token = _receiver.set(receiver)
    try:
        yield
    finally:
        _receiver.reset(token)


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Any,  # noqa: ANN401 - whatever the module has in place of a mask
    scaling: float | None = None,
    **others: Any,  # noqa: ANN401 - the library's
) -> tuple[Tensor, None]:
    """Compute attention; called by modules, with the names of the library's interface."""
    call = AttentionCall(module, query, key, value, attention_mask, scaling, others)
    return _receiver.get()(call), None


class _Mask(NamedTuple):
    """What a mask says.

    Attributes:
        window: tokens that a token attends to, itself included; None for all before it.
        problem: why attention cannot compute it; "" if it can.
    """

    window: int | None
    problem: str = ""


def _probe_mask(
    batch_size: int,
    q_length: int,
    kv_length: int,
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    **_others: Any,  # noqa: ANN401 - the library's
) -> Tensor:
    """Return a mask without memory that says what it is; called by models, as `_attention` is."""
    mask = torch.empty((batch_size, 1, q_length, kv_length), dtype=torch.bool, device="meta")
    setattr(mask, _MASK, _read_mask(mask_function, _context.get()))
    return mask


_context: ContextVar[int] = ContextVar("tokens of the context")


def _read_mask(
    mask_function: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor], context: int
) -> _Mask:
    """Find the window of a mask from what the last token of a context and some others see."""
    zero = torch.zeros((1, 1, 1, 1), dtype=torch.int64, device="cpu")
    keys = torch.arange(context + 1, device="cpu").view(1, 1, 1, -1)

    def seen(query: int) -> Tensor:
        return mask_function(zero, zero, zero + query, keys).expand(keys.shape)[0, 0, 0]

    window = int(seen(context - 1).sum())
    others = {0, 1, window - 1, window, window + 1, 3 * window // 2, context // 2, context - 1}
    for query in (it for it in others if 0 <= it < context):
        expected = (keys[0, 0, 0] <= query) & (keys[0, 0, 0] > query - max(window, 1))
        if not torch.equal(seen(query), expected):
            return _Mask(None, "a mask that is neither causal nor a sliding window")
    return _Mask(window if window < context else None)


@functools.cache
def library() -> Any:  # noqa: ANN401 - a package of which few functions have types
    """Import the library and add our functions to its implementations of attention.

    Raises:
        UnsupportedModelError: it is not installed.
    """
    try:
        import transformers  # noqa: PLC0415 - takes seconds
    except ImportError as error:
        raise UnsupportedModelError(
            f"{NAME} needs the packages of the extra `transformers`, pip install 'tessera[transformers]': {error}"
        ) from None
    for name in (STEPS, PROBE):
        transformers.AttentionInterface.register(name, _attention)
    transformers.AttentionMaskInterface.register(PROBE, _probe_mask)
    return transformers


class _Probe:
    """Records what the layers call.

    Attributes:
        layers: by index, what they compute.
        problems: why the modules cannot be served.
    """

    def __init__(self) -> None:
        self.layers: dict[int, Attention] = {}
        self.problems: dict[str, None] = {}

    def __call__(self, call: AttentionCall) -> Tensor:
        """Record a call."""
        self._note(call)
        heads, tokens, dim = call.query.shape[1], call.query.shape[2], call.value.shape[-1]
        return call.query.new_empty((1, tokens, heads, dim))

    def _note(self, call: AttentionCall) -> None:
        (batch, heads, tokens, dim), (kv_batch, kv_heads, kv_tokens, _) = (
            call.query.shape,
            call.key.shape,
        )
        mask = getattr(call.mask, _MASK, _Mask(None, "a mask that is not of the library's masks"))
        others = {name: it for name, it in call.others.items() if it is not None}
        softcap = others.pop("softcap", None)
        window = others.pop("sliding_window", mask.window)
        window = None if window is None or window >= _context.get() else window
        others.pop("dropout", None)  # none in evaluation
        index = getattr(call.module, "layer_idx", None)
        found = (
            (not isinstance(index, int), "attention without an index of its layer"),
            (index in self.layers, f"more than one attention in layer {index}"),
            (batch != 1 or kv_batch != 1 or kv_tokens != tokens, "attention among other tokens than a step's"),
            (call.key.shape[-1] != dim or call.value.shape != call.key.shape,
             f"values of another size than keys and queries ({call.value.shape[-1]}, {call.key.shape[-1]}, {dim})"),
            (heads % kv_heads != 0, f"{heads} query heads for {kv_heads} key-value heads"),
            (dim % 2 != 0, f"heads of {dim} elements, which is odd"),
            (bool(mask.problem), mask.problem),
            (mask.window != window and not mask.problem,
             f"a window of {window} tokens with a mask of {mask.window}"),
            (others.pop("is_causal", True) is not True, "attention that is not causal"),
        )  # fmt: skip
        self.problems |= {reason: None for fails, reason in found if fails}
        read = (f"{it} of attention" for it in others.keys() - _NO_EFFECT)
        self.problems |= dict.fromkeys(read)
        if isinstance(index, int):
            scale = dim**-0.5 if call.scaling is None else float(call.scaling)
            self.layers[index] = Attention(
                heads, kv_heads, dim, scale, mask.window, None, softcap=softcap
            )


class ProbedModel(Protocol):
    """What is read of a model of the library."""

    config: Any

    def __call__(self, **arguments: Any) -> Any:  # noqa: ANN401 - the library's
        """Compute."""


def probe(model: ProbedModel, context: int) -> tuple[Layer, ...]:
    """Return the layers of a model, which have only their attention, by what its modules call.

    Args:
        model: on the device "meta", with the implementation `PROBE` of attention, in evaluation mode.
        context: most tokens of a sequence.

    Raises:
        UnsupportedModelError: a part of it is not what our attention computes; names every such part.
    """
    name, count = type(model).__name__, model.config.get_text_config().num_hidden_layers
    found, token = _Probe(), _context.set(context)
    tokens = min(context, _MOST_TOKENS)
    ids = torch.zeros((1, tokens), dtype=torch.int64, device="meta")
    try:
        with receiving(found), torch.inference_mode(), torch.device("meta"):
            logits = model(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                position_ids=torch.arange(tokens, device="meta")[None],
                use_cache=False,
            ).logits
    except Exception as error:  # code of the library, of any model
        text = str(error).partition("\n")[0]
        raise unsupported(
            name, [*found.problems, f"modules that fail when probed: {text}"]
        ) from error
    finally:
        _context.reset(token)
    if missing := sorted({*range(count)} - found.layers.keys()):
        found.problems[f"no attention in layer {missing[0]}"] = None
    if extra := sorted(found.layers.keys() - {*range(count)}):
        found.problems[f"attention in layer {extra[0]} of {count}"] = None
    if logits.shape[-1] != model.config.get_text_config().vocab_size:
        found.problems[f"scores of {logits.shape[-1]} tokens"] = None
    if found.problems:
        raise unsupported(name, found.problems)
    return tuple(Layer(found.layers[index], _NO_MLP) for index in range(count))


_NO_MLP: Final = Dense(0)


def unsupported(name: str, problems: Any) -> UnsupportedModelError:  # noqa: ANN401 - texts
    """Return the error of a model whose modules do not fit, with the reasons."""
    return UnsupportedModelError(f"{NAME} does not compute {name}, which has {'; '.join(problems)}")

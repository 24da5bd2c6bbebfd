"""A mixer with a state of fixed size, as a table of the tests adds it: what a recurrent layer needs of the engine."""

from __future__ import annotations

import dataclasses
import json
from typing import Any, NamedTuple

import torch

from model.executors.layers import binder
from model.executors.layers import tables as executor
from model.executors.layers.binder import Product
from model.executors.layers.network import MixerSpec
from model.families import llama, table
from model.families.family import Family
from model.families.tensors import LLAMA
from model.network import layers as parameters
from model.network.state import Fixed
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

DECAY = 0.9
MIX = 0.5


@dataclasses.dataclass(frozen=True)
class Toy:
    """u_t = W x_t, h_t = DECAY * h_{t-1} + u_t + MIX * u_{t-1}; adds V tanh(h_t) to the stream.

    The state of a sequence is h and u of its last token, so that every earlier token and their order matter.
    """

    channels: int

    num_float32 = 0

    def num_parameters(self, hidden):
        return 2 * self.channels * hidden

    def matrices(self, hidden):
        return {"input": ((self.channels,), hidden), "output": ((hidden,), self.channels)}

    def state(self, _dtype):
        return Fixed(((self.channels,), (1, self.channels)), ("float32", "float32"))


def add_parameters(layer, mixer, new):
    layer.input = new.matrix("input", mixer.channels, new.hidden)
    layer.output = new.matrix("output", new.hidden, mixer.channels)
    layer.input_bias = layer.output_bias = None


def recurrence(u, h, last):
    """Return h of every token, [T, E], and the last u, [1, E].

    Args:
        u: [T, E].
        h: [E], of the token before.
        last: [1, E], u of the token before.
    """
    found = []
    for now, before in zip(u, torch.cat((last, u)), strict=False):
        h = DECAY * h + now + MIX * before
        found.append(h)
    return torch.stack(found), u[-1:]


class BoundToy(NamedTuple):
    """See `BoundMixer`."""

    input: Any
    output: Any

    @classmethod
    def bind(cls, _mixer, binder):
        return cls(binder.reading("input"), binder.adding("output"))

    def read(self, index, residual, states):
        u, residual = self.input.from_residual(residual)
        return torch.tanh(states(index, u)), residual


class PagedToy:
    """Computes with the states in the slots of a cache."""

    def __init__(self, _model, it):
        bucket, arrays = it.step.bucket, it.step.device
        assert bucket.has_states
        first = bucket.decode_tokens
        ends = torch.cat((arrays.cu_seqlens[1:], first + arrays.prompt_cu_seqlens[1:])).tolist()
        begins = [0, *ends[:-1]]
        slots = arrays.state_slots.tolist()
        assert len(ends) == len(slots)
        self.rows = [
            (begin, end, *pair) for begin, end, pair in zip(begins, ends, slots, strict=True)
        ]
        self.fixed = it.state.fixed

    def __call__(self, index, u):
        hidden, last = self.fixed[index]
        out = torch.zeros_like(u)
        read = {slot: (hidden[slot].clone(), last[slot].clone()) for _, _, slot, _ in self.rows}
        for begin, end, source, target in self.rows:
            if begin == end:
                continue
            h, before = read[source] if source >= 0 else (u.new_zeros(u.shape[1]), u[:1] * 0)
            out[begin:end], before = recurrence(u[begin:end], h, before)
            if target >= 0:
                hidden[target], last[target] = out[end - 1], before
        return out


def dense(_model, _positions, _hidden):
    """Return what computes whole sequences, [B, L, E], without a cache."""

    def states(_index, u):
        zeros = u.new_zeros(u.shape[-1])
        return torch.stack([recurrence(it, zeros, zeros[None])[0] for it in u])

    return states


def network(keys):
    """Return the network of a Llama in which all layers but the second have a `Toy`."""
    found = llama.network(keys)
    toys = [dataclasses.replace(layer, mixer=Toy(48)) for layer in found.layers]
    return dataclasses.replace(found, layers=(toys[0], found.layers[1], *toys[2:]))


def register(monkeypatch):
    """Add the mixer and a family with it to the tables."""
    modules = LLAMA.layer_modules | {"input": "mixer.input", "output": "mixer.output"}
    tensors = dataclasses.replace(LLAMA, layer_modules=modules)
    family = Family("ToyForCausalLM", "toy", network, tensors=tensors)
    monkeypatch.setitem(table.FAMILIES, family.architecture, family)
    monkeypatch.setitem(executor.MIXERS, Toy, MixerSpec(BoundToy.bind, PagedToy, dense, {}))
    products = (Product("input", "input_norm"), Product("output"))
    monkeypatch.setitem(binder.PRODUCTS, Toy, lambda _mixer: products)
    monkeypatch.setitem(parameters.PARAMETERS, Toy, add_parameters)


def write_config(folder):
    """Write the config.json of a small model with the layers [Toy, Attention, Toy]; return the folder."""
    write_tiny_checkpoint(folder, num_hidden_layers=3)
    content = json.loads((folder / "config.json").read_text())
    content |= {"architectures": ["ToyForCausalLM"], "model_type": "toy", "initializer_range": 0.3}
    (folder / "config.json").write_text(json.dumps(content))
    return folder


class Reference:
    """Greedy tokens, each computed from the whole text before it, without a cache.

    Args:
        model: with the same weights as the engine's.
    """

    def __init__(self, model):
        self.model, self.known = model, {}

    def __call__(self, prompt, max_new_tokens):
        text = list(prompt)
        for _ in range(max_new_tokens):
            key = tuple(text)
            if key not in self.known:
                self.known[key] = self.next(text)
            text.append(self.known[key])
        return text[len(prompt) :]

    @torch.inference_mode()
    def next(self, text):
        ids = torch.tensor([text])
        hidden = self.model(ids, torch.arange(len(text)))
        logits = self.model.logits(hidden[0, -1:])
        assert logits.shape == (1, VOCAB_SIZE)
        return int(logits.argmax())

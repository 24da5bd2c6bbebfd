"""Kernels of a layer and of greedy sampling on a GPU: accuracy, dependent launches and CUDA graphs."""

from __future__ import annotations

import pytest
import torch

import kernels
from kernels.linear.problem import LinearProblem
from kernels.linear.registry import LIBRARY
from kernels.linear.select import select_linear
from kernels.linear.tuned import tuned_linear
from kernels.linear.weights import Norm
from kernels.norms import pytorch
from kernels.norms.gpu.norm_and_gate import add_rms_norm, silu_and_mul
from kernels.norms.gpu.output_gate import multiply_by_sigmoid
from kernels.rope.gpu.rope_cache import rope_and_write_kv
from kernels.sampling.gpu.best_token import best_tokens
from kernels.sampling.tile_best import TileBest
from kernels.sampling.tokens import embed_tokens
from tests.kernels.linear.layer import linear
from tests.kernels.references import reference
from tests.kernels.references.problems import assert_no_worse_than

DEVICE = "cuda"
EPS = 1e-6
HIDDEN, HEADS, INNER, VOCABULARY, LAYERS = 1024, 2048, 3072, 32003, 6
ROWS = [1, 2, 3, 4, 5, 64]
DTYPES = ["bfloat16", "float16"]
REPEATS = 50


def supports_pdl():
    return kernels.detect(DEVICE).sm >= 90


def choose(rows, outputs, inputs, dtype="bfloat16", *, gated=False):
    problem = LinearProblem(rows, outputs, inputs, dtype, gated)
    return select_linear(problem, kernels.detect(DEVICE), tuned_linear)


def random(*shape, dtype=torch.bfloat16, scale=1.0, seed=0):
    generator = torch.Generator(DEVICE).manual_seed(seed)
    return (torch.randn(shape, device=DEVICE, generator=generator) * scale).to(dtype)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("rows", ROWS)
@pytest.mark.parametrize(
    ("outputs", "inputs", "gated", "around"),
    [
        (4096, 1024, False, "norm"),
        (1024, 2048, False, "residual"),
        (3072, 1024, True, "norm"),
        (1024, 3072, False, "residual"),
        (4096, 14336, False, "residual"),
        (1001, 576, False, "bias"),
        (1536, 576, True, "bias"),
        (20000, 4096, False, "norm"),
    ],
)
def test_a_layer_agrees_with_its_formula(dtype, rows, outputs, inputs, gated, around):
    choice = choose(rows, outputs, inputs, dtype, gated=gated)
    kind = getattr(torch, dtype)
    x = random(rows, inputs, dtype=kind)
    weight = random(
        choice.problem.matrices * outputs, inputs, dtype=kind, scale=inputs**-0.5, seed=1
    )
    bias = random(len(weight), dtype=kind) if around == "bias" else None
    norm = Norm(random(inputs, dtype=kind, seed=2), EPS) if around == "norm" else None
    residual = random(rows, outputs, dtype=kind, seed=3) if around == "residual" else None

    def formula(at):
        values = reference.rms_norm(x, *norm, at) if norm else x.to(at)
        result = values @ weight.to(at).T + (0 if bias is None else bias.to(at))
        result = reference.silu_and_mul(result, at) if gated else result
        return result if residual is None else result + residual.to(at)

    for pdl in (False, supports_pdl()):
        out = torch.full((rows, outputs), float("nan"), dtype=kind, device=DEVICE)
        around = {"bias": bias, "norm": norm, "residual": residual}
        linear(x, weight, choice, out, **around, pdl=pdl)

        assert_no_worse_than(out, formula(torch.float64).float(), formula(kind), factor=3.0)


class Step:
    """The layers of a small model without attention, chained as in a step."""

    def __init__(self, rows):
        shapes = {
            "qkv": (2 * HEADS, HIDDEN, False),
            "output": (HIDDEN, HEADS, False),
            "gate_up": (INNER, HIDDEN, True),
            "down": (HIDDEN, INNER, False),
        }
        self.choices = {name: choose(rows, n, k, gated=g) for name, (n, k, g) in shapes.items()}
        self.weights = [
            {
                name: random(n * (2 if g else 1), k, scale=k**-0.5, seed=10 * layer + number)
                for number, (name, (n, k, g)) in enumerate(shapes.items())
            }
            for layer in range(LAYERS)
        ]
        self.head = random(VOCABULARY, HIDDEN, scale=HIDDEN**-0.5, seed=99)
        self.head_choice = choose(rows, VOCABULARY, HIDDEN)
        self.norm = Norm(torch.ones(HIDDEN, dtype=torch.bfloat16, device=DEVICE), EPS)
        self.start = random(rows, HIDDEN, seed=7)
        self.hidden = torch.empty_like(self.start)
        self.packed = torch.empty(rows, 2 * HEADS, dtype=torch.bfloat16, device=DEVICE)
        self.inner = torch.empty(rows, INNER, dtype=torch.bfloat16, device=DEVICE)
        self.best = TileBest.empty(rows, self.head_choice.tiles, DEVICE)
        self.logprobs = torch.empty(rows, device=DEVICE)
        self.logits = torch.empty(rows, VOCABULARY, dtype=torch.bfloat16, device=DEVICE)
        self.token = torch.empty(rows, dtype=torch.int64, device=DEVICE)
        self.checked = torch.zeros(rows, dtype=torch.int64, device=DEVICE)

    def run(self, *, pdl):
        normed = {"norm": self.norm, "pdl": pdl}
        added = {"residual": self.hidden, "pdl": pdl}
        choices, hidden = self.choices, self.hidden
        torch.add(self.start, 0, out=hidden)
        for weights in self.weights:
            linear(hidden, weights["qkv"], choices["qkv"], self.packed, **normed)
            linear(self.packed[:, :HEADS], weights["output"], choices["output"], hidden, **added)
            linear(hidden, weights["gate_up"], choices["gate_up"], self.inner, **normed)
            linear(self.inner, weights["down"], choices["down"], hidden, **added)
        if self.head_choice.spec is LIBRARY:
            linear(hidden, self.head, self.head_choice, self.logits, **normed)
            self.token.copy_(self.logits.argmax(-1))
            return
        linear(hidden, self.head, self.head_choice, self.logits, **normed, best=self.best)
        best_tokens(self.best, self.token, self.checked, self.logprobs, pdl=pdl)

    def result(self):
        torch.cuda.synchronize()
        found = self.hidden.clone(), self.token.clone()
        self.hidden.fill_(float("nan"))
        self.token.fill_(-1)
        return found


@pytest.mark.parametrize("rows", [1, 4, 64])
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_dependent_launches_and_graphs_change_no_bit_in_many_repeats(rows, captured):
    if not supports_pdl():
        pytest.skip("dependent launches need compute capability 9.0")
    step = Step(rows)
    step.run(pdl=False)
    hidden, token = step.result()
    run = lambda: step.run(pdl=True)  # noqa: E731
    run()
    step.result()
    if captured:
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            step.run(pdl=True)
        run = graph.replay

    for _ in range(REPEATS):
        run()
        again = step.result()

        assert torch.equal(again[0], hidden)
        assert torch.equal(again[1], token)
    assert bool((step.checked >= 0).all())
    assert bool(hidden.isfinite().all())


@pytest.mark.parametrize("rows", [1, 2, 3, 4])
@pytest.mark.parametrize("vocabulary", [1001, 128256])
def test_the_greedy_token_is_the_first_argmax_of_the_logits(rows, vocabulary):
    choice = choose(rows, vocabulary, 256)
    x, weight = random(rows, 256), random(vocabulary, 256, seed=1)
    weight[vocabulary // 2] = weight[vocabulary // 3]
    best, logprobs = TileBest.empty(rows, choice.tiles, DEVICE), torch.empty(rows, device=DEVICE)
    logits = torch.empty(rows, vocabulary, dtype=torch.bfloat16, device=DEVICE)
    token, checked = torch.empty((2, rows), dtype=torch.int64, device=DEVICE)

    linear(x, weight, choice, logits, best=best)
    best_tokens(best, token, checked, logprobs)

    largest = logits.amax(-1, keepdim=True)
    ids = torch.arange(vocabulary, device=DEVICE)
    assert torch.equal(token, torch.where(logits == largest, ids, vocabulary).amin(-1))
    assert torch.equal(checked, token)
    truth = logits.double().log_softmax(-1).amax(-1)
    torch.testing.assert_close(logprobs.double(), truth, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("tokens", [1, 5, 64, 300, 4096])
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("norms", [False, True], ids=["", "norms"])
def test_rope_rotates_queries_and_keys_and_writes_the_cache(tokens, head_dim, norms):
    qkv = random(tokens, 32 * head_dim)
    kv = torch.full((2, tokens // 16 + 2, 16, 8, head_dim), 7.0, device=DEVICE).bfloat16()
    positions = torch.randint(0, 999, (tokens,), device=DEVICE)
    slots = torch.randperm(kv.shape[1] * 16, device=DEVICE)[:tokens].int()
    angles = torch.rand(999, head_dim // 2, device=DEVICE) * 100
    rope = kernels.rope_tables(angles, dtype=torch.bfloat16)
    weights = (random(head_dim, seed=4), random(head_dim, seed=5)) if norms else None
    q, k, v = torch.split(qkv.clone().unflatten(1, (-1, head_dim)), [16, 8, 8], 1)

    def formula(at):
        rotated = []
        for number, x in enumerate((q, k)):
            wide = kernels.rms_norm(x.to(at), weights[number].to(at), EPS) if norms else x.to(at)
            rotated.append(kernels.apply_rope(wide, *(table[positions].to(at) for table in rope)))
        return rotated

    found = rope_and_write_kv(
        qkv, kv, rope, positions, slots, norms=weights, eps=EPS, pdl=supports_pdl()
    )

    stored = kv.flatten(1, 2)[:, slots.long()]
    for out, truth, plain in zip(
        (found, stored[0]), formula(torch.float32), formula(torch.bfloat16), strict=True
    ):
        assert_no_worse_than(out, truth, plain)
    assert torch.equal(stored[1], v)


@pytest.mark.parametrize("rows", [1, 64, 3000])
def test_embedding_reads_ids_and_tokens_sampled_by_the_step_before(rows):
    table = random(VOCABULARY, HIDDEN)
    ids = torch.arange(rows, device=DEVICE) * 7 % VOCABULARY
    sampled = (ids + 1) % VOCABULARY
    every_other = torch.where(ids % 2 == 0, ids, -1 - torch.arange(rows, device=DEVICE))

    out = embed_tokens(every_other, table, sampled)

    assert torch.equal(out, table[torch.where(ids % 2 == 0, ids, sampled)])


@pytest.mark.parametrize("rows", [1, 64, 3000])
@pytest.mark.parametrize("size", [576, 4096])
def test_norm_and_gate_agree_with_their_formulas(rows, size):
    x, weight = random(rows, size), random(size, seed=2)
    parts = torch.stack([random(rows, size, seed=seed).float() for seed in (3, 4)])
    total = (x.float() + (parts[0] + parts[1])).to(x.dtype)

    gated, expected = silu_and_mul(x, pdl=supports_pdl()), reference.silu_and_mul(x)
    by_torch = kernels.silu_and_mul(x)
    normed = add_rms_norm(x, weight, EPS, parts=parts, pdl=supports_pdl())

    assert torch.equal(x, total)
    truth = reference.rms_norm(total, weight, EPS)
    assert_no_worse_than(normed, truth, reference.rms_norm(total, weight, EPS, torch.bfloat16))
    assert_no_worse_than(gated, expected, by_torch)


@pytest.mark.parametrize("rows", [1, 64, 3000])
@pytest.mark.parametrize("size", [576, 2048])
def test_an_output_gate_agrees_with_its_formula(rows, size):
    x, gate = random(rows, size), random(rows, size + 3072, seed=2)[:, :size]
    truth, by_torch = x.double() * gate.double().sigmoid(), pytorch.multiply_by_sigmoid(x, gate)

    found = multiply_by_sigmoid(x, gate, pdl=supports_pdl())

    assert found is x
    assert_no_worse_than(found, truth, by_torch)

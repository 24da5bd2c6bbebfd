"""Attention with the signatures of PyTorch and transformers gives their results."""

from __future__ import annotations

import itertools
import logging

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    Llama4TextConfig,
    LlamaConfig,
    Qwen3Config,
    StaticCache,
)

from kernels.attention.training import autograd, huggingface
from kernels.attention.training.drop_in import scaled_dot_product_attention, sdpa_unsupported
from kernels.attention.training.memory_efficient import memory_efficient_attention
from kernels.attention.training.registry import select_training
from kernels.errors import ShapeError

SIZES = {
    "vocab_size": 61, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128,
    "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip
CONFIGS = {
    "llama": LlamaConfig(**SIZES),
    "qwen3": Qwen3Config(**SIZES),
    "gemma2": Gemma2Config(**SIZES, sliding_window=8, query_pre_attn_scalar=8, hidden_activation="gelu_pytorch_tanh"),
    "gemma3": Gemma3TextConfig(**SIZES, sliding_window=8, query_pre_attn_scalar=8),
}  # fmt: skip


@pytest.fixture(scope="module", autouse=True)
def _registered():
    huggingface.register()
    huggingface.register()


def make(name, implementation):
    torch.manual_seed(0)
    # Gemma 2's softcap is computed by its eager attention only.
    if implementation == "theirs":
        implementation = "eager" if name == "gemma2" else "sdpa"
    model = AutoModelForCausalLM.from_config(CONFIGS[name], attn_implementation=implementation)
    return model.to(torch.float32)


def batch(seed, count=3, length=24):
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(3, 61, (count, length), generator=generator)
    mask = torch.ones_like(ids)
    for row, padding in enumerate((0, 5, 11)[:count]):
        mask[row, :padding] = 0
    return ids.masked_fill(mask == 0, 0), mask


@pytest.mark.parametrize("name", CONFIGS)
def test_50_training_steps_have_the_same_losses(name):
    curves = []
    for implementation in ("theirs", huggingface.NAME):
        model = make(name, implementation).train()
        optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
        losses = []
        for step in range(50):
            ids, mask = batch(step % 4)
            # The first token of a padded row would be predicted by padding, whose results differ.
            counted = mask * mask.roll(1, 1)
            labels = ids.masked_fill(counted == 0, -100)
            out = model(input_ids=ids, attention_mask=mask, labels=labels)
            out.loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(out.loss.detach()))
        curves.append(losses)

    assert curves[1] == pytest.approx(curves[0], rel=2e-3)
    assert curves[0][-1] < curves[0][0]


@pytest.mark.parametrize("name", CONFIGS)
def test_padded_generation_gives_the_same_tokens(name):
    ids, mask = batch(0)
    answers = [
        make(name, implementation)
        .eval()
        .generate(input_ids=ids, attention_mask=mask, max_new_tokens=20, do_sample=False)
        for implementation in ("theirs", huggingface.NAME)
    ]

    assert torch.equal(*answers)


@pytest.mark.parametrize("by", ["position_ids", "cu_seq_lens"])
def test_packed_sequences_do_not_see_each_other(by):
    model = make("llama", huggingface.NAME).eval()
    ids, _ = batch(1, count=2, length=12)
    lengths = [12, 7]
    alone = [model(input_ids=row[None, :n]).logits[0] for row, n in zip(ids, lengths, strict=True)]

    packed = torch.cat([row[:n] for row, n in zip(ids, lengths, strict=True)])[None]
    positions = torch.cat([torch.arange(n) for n in lengths])[None]
    starts = torch.tensor([0, 12, 19], dtype=torch.int32)
    more = {}
    if by == "cu_seq_lens":
        more = {
            "cu_seq_lens_q": starts,
            "cu_seq_lens_k": starts,
            "max_length_q": 12,
            "max_length_k": 12,
        }
    together = model(input_ids=packed, position_ids=positions, **more).logits[0]

    torch.testing.assert_close(together, torch.cat(alone), rtol=1e-4, atol=1e-4)


def test_rows_of_packed_sequences_agree_with_sdpa():
    ids, _ = batch(2)
    lengths = [(10, 14), (24,), (3, 20, 1)]
    positions = torch.stack([torch.cat([torch.arange(n) for n in row]) for row in lengths])
    theirs, ours = (
        make("gemma3", implementation).eval()(ids, position_ids=positions, use_cache=False).logits
        for implementation in ("theirs", huggingface.NAME)
    )

    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("name", ["llama", "gemma3"])
@pytest.mark.parametrize("padded", [True, False])
def test_generation_with_a_static_cache_gives_the_same_tokens(name, padded):
    ids, mask = batch(0)
    answers = [
        make(name, implementation)
        .eval()
        .generate(
            input_ids=ids,
            attention_mask=mask if padded else None,
            max_new_tokens=12,
            do_sample=False,
            cache_implementation=cache,
            disable_compile=True,
        )
        for implementation, cache in (("theirs", "dynamic"), (huggingface.NAME, "static"))
    ]

    assert torch.equal(*answers)


# Version 5.24 names the argument `cache`; earlier ones do not know that.
@pytest.mark.filterwarnings("ignore:`past_key_values` is deprecated:FutureWarning")
def test_a_prompt_in_parts_continues_in_a_static_cache_without_a_mask():
    ids, _ = batch(1)
    found = []
    for implementation in ("theirs", huggingface.NAME):
        model = make("llama", implementation).eval()
        cache = StaticCache(config=model.config, max_cache_len=64)
        with torch.no_grad():
            parts = [model(part, past_key_values=cache).logits for part in ids.split([13, 11], 1)]
        found.append(torch.cat(parts, 1))

    torch.testing.assert_close(found[1], found[0], rtol=1e-4, atol=1e-4)


def test_training_runs_in_autocast():
    ids, mask = batch(0)
    losses = []
    for implementation in ("theirs", huggingface.NAME):
        model = make("llama", implementation).train()
        with torch.autocast("cpu", torch.bfloat16):
            loss = model(input_ids=ids, attention_mask=mask, labels=ids).loss
        loss.backward()
        losses.append(float(loss.detach()))

    assert losses[1] == pytest.approx(losses[0], rel=1e-2)


def test_values_may_have_another_head_dim():
    torch.manual_seed(0)
    q, k, v = torch.randn(2, 4, 5, 24), torch.randn(2, 2, 5, 24), torch.randn(2, 2, 5, 16)

    out, _ = huggingface.attention(torch.nn.Module(), q, k, v, None)

    wanted = functional.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
    torch.testing.assert_close(out, wanted.transpose(1, 2), rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"s_aux": torch.zeros(2)}, "s_aux is not supported"),
        ({"position_bias": torch.zeros(1, 2, 3, 3)}, "position_bias is not supported"),
        ({"output_attentions": True}, "output_attentions is not supported"),
        (
            {"is_causal": False, "sliding_window": 2},
            "a sliding window of 2 on 3 keys without a causal",
        ),
        ({"attention_mask": torch.zeros(1, 1, 3, 3)}, r"the mask is \[1, 1, 3, 3\]"),
    ],
)
def test_what_a_layer_asks_for_in_vain_is_refused(options, words):
    x = torch.zeros(1, 2, 3, 8)

    with pytest.raises(ShapeError, match=words):
        huggingface.attention(torch.nn.Module(), x, x, x, **({"attention_mask": None} | options))


def test_attention_in_chunks_is_refused():
    config = Llama4TextConfig(
        **SIZES, attention_chunk_size=8, intermediate_size_mlp=48, num_local_experts=2
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation=huggingface.NAME)

    with pytest.raises(ShapeError, match="a mask with chunked_overlay"):
        model(batch(0)[0])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "options"),
    [
        (4, 4, {}),
        (4, 4, {"is_causal": True}),
        (4, 2, {"is_causal": True, "enable_gqa": True}),
        (4, 4, {"scale": 0.3}),
    ],
)
def test_sdpa_gives_pytorchs_results_and_gradients(heads, kv_heads, options):
    torch.manual_seed(0)
    shapes = [(2, heads, 13, 16), (2, kv_heads, 13, 16), (2, kv_heads, 13, 16)]
    tensors = [torch.randn(shape) for shape in shapes]
    assert not sdpa_unsupported(
        *tensors,
        is_causal=options.get("is_causal", False),
        enable_gqa=options.get("enable_gqa", False),
    )
    results = []
    for function in (functional.scaled_dot_product_attention, scaled_dot_product_attention):
        inputs = [it.clone().requires_grad_() for it in tensors]
        out = function(*inputs, **options)
        out.square().sum().backward()
        results.append([out, *(it.grad for it in inputs)])

    for theirs, ours in zip(*results, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


def test_sdpa_says_why_pytorch_computes_and_gives_its_result(caplog):
    torch.manual_seed(0)
    q, k = torch.randn(2, 3, 5, 8), torch.randn(2, 3, 7, 8)
    mask = torch.rand(5, 7) < 0.7
    mask[:, 0] = True

    with caplog.at_level(logging.INFO, "kernels.attention.training.drop_in"):
        for _ in range(2):
            ours = scaled_dot_product_attention(q, k, k, attn_mask=mask)

    torch.testing.assert_close(
        ours, functional.scaled_dot_product_attention(q, k, k, attn_mask=mask)
    )
    assert sum("attn_mask" in record.getMessage() for record in caplog.records) <= 1
    assert sdpa_unsupported(q, k, k, is_causal=True) == (
        "is_causal with fewer or more queries than keys",
    )


def test_sdpa_takes_any_leading_dimensions():
    x = torch.randn(2, 3, 4, 5, 8)

    for tensor in (x, x[0, 0]):
        torch.testing.assert_close(
            scaled_dot_product_attention(tensor, tensor, tensor),
            functional.scaled_dot_product_attention(tensor, tensor, tensor),
        )


def run(function, tensors, options):
    """Return the result and the gradients of a function."""
    inputs = [it.clone().requires_grad_() for it in tensors]
    out = function(*inputs, **options)
    (out * out).sum().backward()
    return [out, *(it.grad for it in inputs)]


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("queries", "keys", "value_dim"),
    [((2, 4, 5), 9, 16), ((2, 4, 0), 5, 16), ((2, 4, 5), 0, 16), ((2, 0, 5), 5, 16), ((0, 4, 5), 5, 16),
     ((2, 3, 4, 5), 9, 16), ((4, 5), 9, 16), ((2, 4, 5), 9, 8), ((2, 4, 5), 9, 24)],
    ids=str,
)  # fmt: skip
def test_sdpa_agrees_with_pytorch_on_every_shape(queries, keys, value_dim, dtype):
    torch.manual_seed(0)
    shapes = [(*queries, 16), (*queries[:-1], keys, 16), (*queries[:-1], keys, value_dim)]
    tensors = [torch.randn(shape).to(dtype) for shape in shapes]
    tolerance = {torch.float64: 1e-9, torch.float32: 1e-4}.get(dtype, 6e-2)

    theirs = run(functional.scaled_dot_product_attention, tensors, {})
    ours = run(scaled_dot_product_attention, tensors, {})

    for found, wanted in zip(ours, theirs, strict=True):
        torch.testing.assert_close(found, wanted, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("wanted", [*itertools.product([True, False], repeat=3)])
def test_sdpa_gives_gradients_to_those_who_want_them(wanted):
    tensors = [torch.randn(1, 2, 5, 8, requires_grad=it) for it in wanted]

    out = scaled_dot_product_attention(*tensors)
    if any(wanted):
        out.sum().backward()

    assert tuple(it.grad is not None for it in tensors) == wanted


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"attn_mask": torch.ones(5, 5, dtype=torch.bool)}, "attn_mask"),
        ({"dropout_p": 1.0}, "dropout of all weights"),
        ({"query": torch.zeros(2, 2, 5, 8, dtype=torch.float64)}, "dtypes that differ"),
        ({"query": torch.zeros(2, 2, 5, 8, device="meta")}, "devices that differ"),
        ({"query": torch.zeros(2, 2, 5, 4)}, "head dims of queries and keys that differ"),
        ({"query": torch.zeros(2, 2, 5, 8, dtype=torch.int64)}, "no torch.int64"),
        ({"query": torch.zeros(2, 4, 5, 8)}, "key-value heads without enable_gqa"),
        ({"query": torch.zeros(2, 3, 5, 8), "enable_gqa": True}, "heads that are no multiple of the key-value heads"),
        ({"query": torch.zeros(1, 2, 5, 8)}, "shapes to broadcast"),
        ({"query": torch.zeros(5, 8)}, "the tensors do not have the form [..., H, S, D]"),
        (
            {"query": torch.nested.nested_tensor([torch.zeros(2, 5, 8)] * 2, layout=torch.jagged)},
            "nested tensors",
        ),
    ],
)  # fmt: skip
def test_sdpa_names_what_pytorch_has_to_compute(change, reason):
    x = torch.zeros(2, 2, 5, 8)

    assert reason in sdpa_unsupported(**({"query": x, "key": x, "value": x} | change))


def test_sdpa_takes_the_dtype_of_autocast():
    x = torch.randn(1, 2, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        for causal, other in itertools.product([True, False], [torch.float32, torch.bfloat16]):
            out = scaled_dot_product_attention(x, x.to(other), x, is_causal=causal)
            assert out.dtype is torch.bfloat16
        assert scaled_dot_product_attention(*[x.double()] * 3).dtype is torch.float64


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"dropout_p": 0.5}])
def test_sdpa_compiles_without_a_graph_break_and_says_why_pytorch_computes(
    options, caplog, monkeypatch
):
    monkeypatch.setattr("kernels.attention.training.drop_in._logged", set())
    x = torch.randn(1, 2, 5, 8, requires_grad=True)
    compiled = torch.compile(
        lambda x: scaled_dot_product_attention(x, x, x, **options).sin(),
        backend="aot_eager",
        fullgraph=True,
    )

    with caplog.at_level(logging.INFO, "kernels.attention.training.drop_in"):
        out = compiled(x)
    out.sum().backward()

    said = [
        it.getMessage() for it in caplog.records if it.name == "kernels.attention.training.drop_in"
    ]
    if "dropout_p" in options:
        assert "dropout in a graph of torch.compile" in said[0]
    else:
        wanted = functional.scaled_dot_product_attention(x, x, x, **options).sin()
        torch.testing.assert_close(out, wanted)
        assert not said
    assert x.grad is not None


def test_sdpa_has_no_second_derivative_and_says_so():
    x = torch.randn(1, 1, 3, 4, requires_grad=True)
    (grad,) = torch.autograd.grad(scaled_dot_product_attention(x, x, x).sum(), x, create_graph=True)

    with pytest.raises(RuntimeError, match="no autograd formula was registered"):
        grad.sum().backward()


def layer_of_transformers(q, k, v):
    module = torch.nn.Module()
    return huggingface.attention(module, q, k, v, None, is_causal=False)[0]


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize(
    "function", [scaled_dot_product_attention, memory_efficient_attention, layer_of_transformers]
)
def test_gradients_have_the_same_bits_in_every_run_if_pytorch_is_asked_for_it(
    function, compiled, monkeypatch
):
    """The row is selected when the operators run, so the setting of the call is seen, compiled or not."""
    asked = []

    def record(q, k, batch, problem, arch):
        asked.append(problem.deterministic)
        return select_training(q, k, batch, problem, arch)

    monkeypatch.setattr(autograd, "select_training", record)
    if compiled:
        torch.compiler.reset()
        function = torch.compile(function, backend="aot_eager", fullgraph=True)
    x = torch.randn(1, 4, 5, 8, requires_grad=True)
    for wanted in (False, True, False):
        torch.use_deterministic_algorithms(wanted)
        try:
            function(x, x, x).sum().backward()
        finally:
            torch.use_deterministic_algorithms(False)
        assert asked == [wanted, wanted]  # forward and backward
        asked.clear()

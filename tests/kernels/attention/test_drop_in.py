"""Attention with the signatures of PyTorch and transformers gives their results."""

from __future__ import annotations

import logging

import pytest
import torch
from torch.nn import functional
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    Qwen3Config,
)

from kernels.attention import huggingface
from kernels.attention.drop_in import scaled_dot_product_attention, sdpa_unsupported
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


def test_attention_sinks_are_refused():
    x = torch.zeros(1, 2, 3, 8)

    with pytest.raises(ShapeError, match="s_aux"):
        huggingface.attention(torch.nn.Module(), x, x, x, None, s_aux=torch.zeros(2))


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

    with caplog.at_level(logging.INFO, "kernels.attention.drop_in"):
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

"""A model's decode step through the single launch's functions on a CPU, against its own layers in float32."""

import dataclasses

import pytest
import torch

from kernels import PagedBatch
from kernels.step.single_launch import computed_as_rows
from model.decoder import DecoderLM
from model.executors.single_launch import bind_single_launch, step_shape, unsupported
from model.network.spec import Rotary
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.model.configs import changed, model_config
from tests.model.executors import paged

if HAS_TRITON:
    from tests.kernels.step.step_on_cpu import steps_on_cpu

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host"),
    pytest.mark.timeout(240),
]

BLOCK, BLOCKS = 16, 12
QWEN = model_config(
    architecture="Qwen3ForCausalLM",
    vocab_size=101,
    hidden_size=128,
    intermediate_size=192,
    num_layers=3,
    num_heads=4,
    num_kv_heads=2,
    head_dim=64,
    max_position_embeddings=192,
    qk_norm=True,
    rope=Rotary(theta=1e6),
)
GEMMA1 = changed(
    QWEN,
    architecture="GemmaForCausalLM",
    qk_norm=False,
    norms_add_one=True,
    activation="gelu_tanh",
    scale_embeddings=True,
    tie_word_embeddings=True,
)
PHI = changed(
    QWEN,
    architecture="Phi3ForCausalLM",
    rope=Rotary(
        "longrope",
        original_max_positions=64,
        short_factor=(1.0,) * 24,
        long_factor=tuple(1.0 + 0.25 * i for i in range(24)),
        dims=48,
    ),
)
GEMMA = changed(
    QWEN,
    architecture="Gemma3ForCausalLM",
    norms_add_one=True,
    post_norms=True,
    activation="gelu_tanh",
    scale_embeddings=True,
    tie_word_embeddings=True,
    query_pre_attn_scalar=50,
    local_rope=Rotary(theta=100.0),
    sliding_window=40,
    layer_types=("sliding_attention", "full_attention", "sliding_attention"),
)


def by_layers(model, cache, ids, slots, table, context):
    batch = PagedBatch(
        torch.tensor([0, 1], dtype=torch.int32),
        torch.tensor([context], dtype=torch.int32),
        table,
        num_tokens=1,
        max_seqlen_q=1,
        max_seqlen_k=context,
    )
    metadata = model.attention.metadata(slots, BLOCK, batch, None, cache.kv_dtype)
    return model.logits(
        model.executors.layers.paged(ids, torch.tensor([context - 1]), cache, metadata)
    )


def new_cache(model):
    cache = paged.new_cache(model, BLOCKS, BLOCK)
    for number, layer in enumerate(cache.layers):
        rows = torch.randn(layer.shape, generator=torch.Generator().manual_seed(number))
        layer.copy_(rows.bfloat16())
    return cache


@pytest.mark.parametrize(
    "config", [QWEN, PHI, GEMMA1, GEMMA], ids=["qwen", "phi", "gemma 1", "gemma 3"]
)
def test_a_model_is_bound_as_its_layers_are(monkeypatch, config):
    arch = dataclasses.replace(ARCHES[90], num_sms=16)
    model, wide = DecoderLM(config, torch.bfloat16), DecoderLM(config, torch.float32)
    assert unsupported(dataclasses.replace(model.executors.problem(arch), refusals=())) == ()
    for it in (model, wide):
        it.requires_grad_(requires_grad=False)
    model.init_weights(std=0.1, seed=0)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.named_parameters():
        if name.endswith("norm"):
            parameter.add_(torch.randn(parameter.shape, generator=generator) * 0.3)
    wide.load_state_dict(model.state_dict())
    for it in (model, wide):
        it.reserve_positions(192)
    cache, plain_cache, truth_cache = new_cache(model), new_cache(model), new_cache(wide)
    monkeypatch.setattr("model.network.parameters.detect", lambda _device: arch)
    bound = bind_single_launch(model, cache)
    table = torch.randperm(BLOCKS, generator=generator).int()[None]
    for context in (150, 30):
        ids, found = torch.tensor([context % 90]), torch.empty((1, 101), dtype=torch.bfloat16)
        last = int(table[0, (context - 1) // BLOCK])
        slots = torch.tensor([last * BLOCK + (context - 1) % BLOCK], dtype=torch.int32)
        tokens, sampled = torch.empty(1, dtype=torch.int64), torch.zeros(3, dtype=torch.int64)
        truth = by_layers(wide, truth_cache, ids, slots, table, context)
        as_rows = computed_as_rows(step_shape(model.network))
        first = torch.zeros(1, dtype=torch.int64)
        with steps_on_cpu(bound._weights, cache.layers, cache.scales):
            bound(
                ids, torch.tensor([context - 1]), *((first.int(),) if as_rows else ()), slots, table,
                model.rope_tables, found, tokens, torch.empty(1), sampled, *((first,) if as_rows else ()),
            )  # fmt: skip

        # Layer by layer too, a normalized hidden state is rounded to bfloat16 before it is multiplied.
        plain = by_layers(model, plain_cache, ids, slots, table, context)
        assert (found - truth).norm() < 1.5 * (plain - truth).norm() < 0.03 * truth.norm()
        assert tokens == sampled[0] == found.argmax()
        for rows, expected in zip(cache.layers, truth_cache.layers, strict=True):
            assert (rows - expected).norm() / expected.norm() < 0.002

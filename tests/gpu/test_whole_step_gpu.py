"""A decode step in one launch: as exact as layers by themselves, the same bits each time, and what it writes."""

import dataclasses

import pytest
import torch

from kernels import PagedBatch, detect
from kernels.testing import assert_no_worse_than
from model.config import ModelConfig, RopeConfig
from model.decoder import DecoderLM
from model.kv_cache import KVCache
from model.whole_step import OneSequence, why_not

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

BLOCK = 16
BLOCKS = 260
QWEN = ModelConfig(
    architecture="Qwen3ForCausalLM",
    vocab_size=4096,
    hidden_size=1024,
    intermediate_size=3072,
    num_layers=3,
    num_heads=16,
    num_kv_heads=8,
    head_dim=128,
    max_position_embeddings=8192,
    qk_norm=True,
    tie_word_embeddings=True,
    dtype="bfloat16",
    rope=RopeConfig(theta=1e6),
)
LLAMA = dataclasses.replace(
    QWEN,
    architecture="LlamaForCausalLM",
    hidden_size=2048,
    intermediate_size=8192,
    num_heads=32,
    head_dim=64,
    qk_norm=False,
    tie_word_embeddings=False,
    layer_types=(),
)
BIASED = dataclasses.replace(
    LLAMA,
    architecture="Qwen2ForCausalLM",
    hidden_size=1024,
    intermediate_size=2048,
    num_heads=16,
    num_kv_heads=4,
    attention_bias=True,
    vocab_size=1304,
    layer_types=(),
)
MODELS = {"qwen": QWEN, "llama": LLAMA, "biased": BIASED}
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CONTEXTS = (1, 2, 31, 33, 64, 65, 129, 511, 1024, 4000)


@pytest.fixture(autouse=True)
def on_hopper():
    if detect("cuda").sm != 90:
        pytest.skip("one launch for a step is written for sm_90")


def build(name, dtype):
    model = DecoderLM(MODELS[name], dtype, "cuda")
    model.init_weights(std=0.02, seed=0)
    model.requires_grad_(requires_grad=False)
    for layer in model.decoder_layers:
        for vector in (layer.qkv_bias, layer.q_norm, layer.k_norm, layer.input_norm):
            if vector is not None:
                vector.add_(torch.linspace(-0.5, 0.5, len(vector), device="cuda").to(dtype))
    model.reserve_positions(8192)
    return model


def new_cache(model):
    c = model.config
    dtype = model.embed_tokens.dtype
    cache = KVCache(c.num_layers, BLOCKS, BLOCK, c.num_kv_heads, c.head_dim, dtype, "cuda")
    for number, layer in enumerate(cache.layers):
        layer.copy_(
            torch.randn(layer.shape, generator=torch.Generator().manual_seed(number)).bfloat16()
        )
    return cache


class Step:
    """A token at the end of a sequence of so many, whose blocks lie anywhere."""

    def __init__(self, model, context, write=True):
        self.model = model
        count = -(-context // BLOCK)
        table = torch.randperm(BLOCKS, generator=torch.Generator().manual_seed(context))[:count]
        slot = int(table[-1]) * BLOCK + (context - 1) % BLOCK if write else -1
        self.ids = torch.tensor([context % 1000 + 3]).cuda()
        self.positions = torch.tensor([context - 1]).cuda()
        self.slots = torch.tensor([slot], dtype=torch.int32).cuda()
        self.table = table.int()[None].cuda()
        self.context = context
        vocabulary = model.config.vocab_size
        self.logits = torch.empty(1, vocabulary, dtype=model.embed_tokens.dtype, device="cuda")
        self.tokens = torch.empty(1, dtype=torch.int64, device="cuda")
        self.logprobs = torch.empty(1, device="cuda")
        self.drawn = torch.zeros(5, dtype=torch.int64, device="cuda")

    @torch.inference_mode()
    def by_layers(self, cache):
        int32 = {"dtype": torch.int32, "device": "cuda"}
        batch = PagedBatch(
            torch.tensor([0, 1], **int32),
            torch.tensor([self.context], **int32),
            self.table,
            num_tokens=1,
            max_seqlen_q=1,
            max_seqlen_k=self.context,
        )
        metadata = self.model.attention_metadata(self.slots, BLOCK, batch, None)
        hidden = self.model(self.ids, self.positions, cache, metadata)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def at_once(self, one):
        one(
            self.ids, self.positions, self.slots, self.table, self.logits, self.tokens, self.logprobs, self.drawn
        )  # fmt: skip
        return self.logits.clone()

    def true_logprob(self):
        """Of the stored logits."""
        return self.logits.double().log_softmax(-1).amax(-1)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", MODELS)
def test_it_is_as_exact_as_layers_and_writes_the_same_cache(name, dtype):
    model = build(name, dtype)
    wide = build(name, torch.float32)
    wide.load_state_dict(model.state_dict())
    one_cache = new_cache(model)
    one = OneSequence(model, one_cache)
    for context in CONTEXTS:
        cache, truth_cache = new_cache(model), new_cache(wide)
        step = Step(model, context)
        plain, truth = step.by_layers(cache), Step(wide, context).by_layers(truth_cache)

        found = step.at_once(one)

        assert_no_worse_than(found.float(), truth, plain.float(), factor=3.0)
        for layer in range(model.config.num_layers):
            kv, expected = one_cache.layer(layer), truth_cache.layer(layer)
            assert_no_worse_than(kv.float(), expected, cache.layer(layer).float(), factor=3.0)
            kv.copy_(new_cache(model).layer(layer))
        assert step.tokens.item() == step.drawn[0].item() == found.float().argmax().item()
        torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


@pytest.mark.parametrize("name", ["qwen", "biased"])
def test_the_same_bits_come_each_time_and_from_a_recording(name):
    model = build(name, torch.bfloat16)
    one = OneSequence(model, new_cache(model))
    step = Step(model, 700)
    first = step.at_once(one)
    logprob = step.logprobs.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.at_once(one)

    for _ in range(100):
        assert torch.equal(step.at_once(one), first)
        assert torch.equal(step.logprobs, logprob)
        graph.replay()
        assert torch.equal(step.logits, first)
        assert torch.equal(step.logprobs, logprob)


def test_a_token_is_found_among_those_that_were_drawn():
    model = build("qwen", torch.bfloat16)
    one = OneSequence(model, new_cache(model))
    step = Step(model, 40)
    expected = step.at_once(one)
    step.drawn[3] = step.ids[0]
    step.ids.fill_(-1 - 3)

    assert torch.equal(step.at_once(one), expected)


def test_without_a_slot_nothing_is_written():
    model = build("qwen", torch.bfloat16)
    cache = new_cache(model)
    Step(model, 100, write=False).at_once(OneSequence(model, cache))

    for found, expected in zip(cache.layers, new_cache(model).layers, strict=True):
        assert torch.equal(found, expected)


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_logits_that_are_no_numbers_choose_no_token(bad):
    model = build("qwen", torch.bfloat16)
    model.norm[5] = bad
    step = Step(model, 20)
    step.at_once(OneSequence(model, new_cache(model)))

    assert step.tokens.item() == -1
    assert 0 <= step.drawn[0].item() < model.config.vocab_size


def test_equal_logits_choose_the_smallest_id():
    model = build("llama", torch.bfloat16)
    model.lm_head.zero_()
    step = Step(model, 20)
    step.at_once(OneSequence(model, new_cache(model)))

    assert step.tokens.item() == step.drawn[0].item() == 0
    torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


def test_logits_of_minus_infinity_have_no_share_in_the_log_probability():
    model = build("llama", torch.bfloat16)
    step = Step(model, 20)
    one = OneSequence(model, new_cache(model))
    # The logits of all but the first program are one number of the hidden state, then minus infinity.
    model.lm_head[8:] = 0.0
    model.lm_head[8:, 0] = 1.0
    sign = step.at_once(one)[0, 8].sign()
    model.lm_head[8:, 0] = -float("inf") * sign
    step.at_once(one)

    assert step.logits[0, 8:].max() == -float("inf")
    assert 0 <= step.tokens.item() < 8
    torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


def test_models_of_these_shapes_have_no_objection():
    for name in MODELS:
        assert why_not(build(name, torch.bfloat16), detect("cuda"), None) == ""

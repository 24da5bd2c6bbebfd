"""The single-launch decode step: accuracy against separate layers, determinism, and its outputs."""

import dataclasses
import gc
import itertools

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from kernels import FP8, PagedBatch, detect
from kernels.fp8 import quantize_kv_rows
from kernels.hadamard import hadamard_transform
from kernels.step.single_launch import computed_as_rows
from kernels.weight_format import FP8_ROWS, unquantized
from model.decoder import DecoderLM
from model.executors import single_launch
from model.executors.executor import ModelProblem
from model.executors.single_launch import bind_single_launch, step_shape
from model.hub.resolve import BUNDLED, resolve
from model.network.spec import Rotary
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from tests.kernels.references.problems import assert_no_worse_than
from tests.kernels.references.reference_fp8 import dequantize_rows
from tests.model.configs import changed, model_config
from tests.model.executors import paged

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

BLOCK = 16
BLOCKS = 260
QWEN = model_config(
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
    rope=Rotary(theta=1e6),
)
LLAMA = changed(
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
BIASED = changed(
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


def llama(hidden, inner, heads, kv_heads, dim, **changes):
    """Return a model like LLAMA with other sizes."""
    return changed(
        LLAMA,
        hidden_size=hidden,
        intermediate_size=inner,
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=dim,
        layer_types=(),
        **changes,
    )


MODELS = {"qwen": QWEN, "llama": LLAMA, "biased": BIASED}
SHAPES = {
    "groups of 3": llama(576, 1536, 9, 3, 64),
    "groups of 3, 960": llama(960, 2560, 15, 5, 64),
    "groups of 7": changed(
        llama(896, 4864, 14, 2, 64), architecture="Qwen2ForCausalLM", attention_bias=True
    ),
    "groups of 6": llama(1536, 8960, 12, 2, 128),
    "groups of 8": llama(2048, 5632, 32, 4, 64),
    "groups of 16": llama(2048, 4096, 32, 2, 64),
    "wide": llama(3072, 8192, 24, 8, 128),
    "long": llama(3072, 14336, 32, 8, 128, num_layers=2),
    "heads of 80": llama(2560, 6912, 32, 8, 80, vocab_size=1003),
    "heads of 96": llama(1536, 4096, 16, 4, 96),
    "windows": llama(1152, 6912, 4, 1, 256, sliding_window=100),
    "a key-value head each": llama(384, 1024, 12, 12, 32, vocab_size=1001),
}
"""Sizes that real models have, and odd ones."""
WINDOW_IN_TWO = ("sliding_attention", "full_attention", "sliding_attention")
SHAPES["windows in two of three layers"] = changed(
    llama(1152, 2048, 8, 2, 128, sliding_window=100), layer_types=WINDOW_IN_TWO
)
GEMMA = {
    "architecture": "Gemma3ForCausalLM",
    "qk_norm": True,
    "norms_add_one": True,
    "post_norms": True,
    "activation": "gelu_tanh",
    "scale_embeddings": True,
    "tie_word_embeddings": True,
    "rope": Rotary(theta=1e6),
    "local_rope": Rotary(theta=1e4),
    "query_pre_attn_scalar": 200,
    "sliding_window": 512,
}


def gemma(hidden, inner, heads, kv_heads, **changes):
    """Return a model like Gemma 3 with other sizes."""
    changes = GEMMA | {"layer_types": WINDOW_IN_TWO} | changes
    return changed(llama(hidden, inner, heads, kv_heads, 256), **changes)


PLAIN = {
    "post_norms": False, "norms_add_one": False, "activation": "silu", "scale_embeddings": False, "local_rope": None,
}  # fmt: skip
ALONE = ("post_norms", "local_rope")
"""Parts of Gemma 3 without the others."""
GEMMAS = {
    "gemma-3-1b": gemma(1152, 6912, 4, 1, num_layers=6, layer_types=WINDOW_IN_TWO * 2),
    "gemma-3-270m": gemma(640, 2048, 4, 1, sliding_window=100),
    "gemma-3-4b": gemma(2560, 10240, 8, 4, rope=Rotary("linear", 1e6, 8.0)),
    "gemma without norms after": gemma(
        2048, 16384, 8, 1, post_norms=False, local_rope=None, qk_norm=False, sliding_window=None,
        layer_types=(),
    ),
    **{
        f"only {name}": gemma(640, 2048, 4, 1, sliding_window=100, **PLAIN | {name: GEMMA[name]})
        for name in ALONE
    },
}  # fmt: skip
"""Models that are a single launch for one sequence only."""
SHAPES |= GEMMAS
MODELS |= SHAPES
FP8_WEIGHTS = FP8_ROWS
FP8_MODELS = MODELS | {"Llama-3.1-8B": llama(4096, 14336, 32, 8, 128, num_layers=2)}
"""Models of the tests with weights in FP8 and of those on tensor cores; the last one needs them."""
MOST = [name for name in FP8_MODELS if not name.startswith("only")]
CLOSE = {"rtol": 1e-5, "atol": 1e-5}
CONTEXTS = (1, 2, 31, 33, 64, 65, 129, 511, 1024, 4000)


@pytest.fixture(autouse=True)
def on_hopper():
    if detect("cuda").sm != 90:
        pytest.skip("the single-launch step needs sm_90")


def build(name, dtype, weight_format=None):
    model = DecoderLM(FP8_MODELS[name], dtype, "cuda", weight_format)
    model.init_weights(std=0.02, seed=0)
    model.requires_grad_(requires_grad=False)
    for layer in model.decoder_layers:
        norms = (layer.q_norm, layer.k_norm, layer.input_norm, layer.output_norm, layer.down_norm)
        for vector in (layer.qkv_bias, *norms):
            if vector is not None:
                vector.add_(torch.linspace(-0.5, 0.5, len(vector), device="cuda").to(dtype))
    if weight_format is not None:
        # PyTorch would round the weights again, to `dtype`.
        model.optimize()
    model.reserve_positions(8192)
    return model


def problem_of(model):
    """Return the problem of a model that is served, for kernels that need not have been measured."""
    return dataclasses.replace(
        model.executors.problem(detect("cuda")), refusals=(), unmeasured=True
    )


def in_float32(model):
    """Return a model with the weights of another one in float32."""
    wide = DecoderLM(model.config, torch.float32, "cuda")
    state = model.state_dict()
    for name in [name for name in state if name.endswith(".scale")]:
        matrix = name.removesuffix("scale") + "numbers"
        state[matrix] = dequantize_rows(state[matrix], state.pop(name), torch.float32)
    wide.load_state_dict(state)
    wide.requires_grad_(requires_grad=False)
    wide.reserve_positions(8192)
    return wide


def new_cache(model, kv_dtype=None):
    dtype = None if kv_dtype is None else getattr(torch, kv_dtype)
    cache = paged.new_cache(model, BLOCKS, BLOCK, dtype)
    fill(cache)
    return cache


def fill(cache):
    for number, (layer, scale) in enumerate(zip(cache.layers, cache.scales, strict=True)):
        generator = torch.Generator().manual_seed(number)
        rows = torch.randn(layer.shape, generator=generator).bfloat16().cuda()
        if scale is None:
            layer.copy_(rows)
            continue
        numbers, scales = quantize_kv_rows(rows)
        layer.copy_(numbers)
        scale.copy_(scales.transpose(2, 3))


def rows_of(cache, layer):
    """Return the dequantized keys and values of a layer, float32."""
    scale = cache.scales[layer]
    if scale is None:
        return cache.layers[layer].float()
    return dequantize_rows(cache.layers[layer], scale.transpose(2, 3), torch.float32)


class Step:
    """A decode step of one sequence of `context` tokens with random blocks."""

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
        vocabulary = model.network.vocab
        self.logits = torch.empty(1, vocabulary, dtype=model.embed_tokens.dtype, device="cuda")
        self.tokens = torch.empty(1, dtype=torch.int64, device="cuda")
        self.logprobs = torch.empty(1, device="cuda")
        self.sampled = torch.zeros(5, dtype=torch.int64, device="cuda")

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
        metadata = self.model.attention.metadata(self.slots, BLOCK, batch, None, cache.kv_dtype)
        hidden = self.model.executors.layers.paged(self.ids, self.positions, cache, metadata)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def single_launch(self, one):
        weight_format = self.model.decoder_layers[0].qkv.weight.format
        rows = computed_as_rows(step_shape(self.model.network), 1, weight_format)
        first = torch.zeros(1, dtype=torch.int64, device="cuda")
        one(
            self.ids, self.positions, *((first.int(),) if rows else ()), self.slots, self.table,
            self.model.rope_tables, self.logits, self.tokens, self.logprobs, self.sampled, *((first,) if rows else ()),
        )  # fmt: skip
        return self.logits.clone()

    def true_logprob(self):
        """Return the exact log-probability of the argmax of the stored logits."""
        return self.logits.double().log_softmax(-1).amax(-1)


class RowsStep:
    """A decode step of several sequences with blocks of their own."""

    def __init__(self, model, contexts, write=True):
        self.model, self.contexts = model, contexts
        generator = torch.Generator().manual_seed(sum(contexts))
        blocks = torch.randperm(BLOCKS, generator=generator).int()
        table = torch.zeros(len(contexts), -(-max(contexts) // BLOCK), dtype=torch.int32)
        slots = torch.full((len(contexts),), -1, dtype=torch.int32)
        for row, context in enumerate(contexts):
            count = -(-context // BLOCK)
            table[row, :count], blocks = blocks[:count], blocks[count:]
            if write:
                slots[row] = table[row, count - 1] * BLOCK + (context - 1) % BLOCK
        self.ids = torch.tensor([context % 1000 + 3 for context in contexts]).cuda()
        self.positions = torch.tensor(contexts).cuda() - 1
        self.slots, self.table = slots.cuda(), table.cuda()
        self.earlier = torch.zeros(len(contexts), dtype=torch.int32, device="cuda")
        vocabulary, dtype = model.network.vocab, model.embed_tokens.dtype
        self.logits = torch.empty(len(contexts), vocabulary, dtype=dtype, device="cuda")
        self.tokens = torch.empty(len(contexts), dtype=torch.int64, device="cuda")
        self.logprobs = torch.empty(len(contexts), device="cuda")
        self.sampled = torch.zeros(12, dtype=torch.int64, device="cuda")
        self.sampled_rows = torch.arange(len(contexts), device="cuda") + 2

    @torch.inference_mode()
    def by_layers(self, cache):
        lengths = (self.positions + 1).int()
        batch = PagedBatch(
            torch.arange(len(lengths) + 1, dtype=torch.int32, device="cuda"),
            lengths,
            self.table,
            num_tokens=len(lengths),
            max_seqlen_q=1,
            max_seqlen_k=max(self.contexts),
        )
        metadata = self.model.attention.metadata(self.slots, BLOCK, batch, None, cache.kv_dtype)
        hidden = self.model.executors.layers.paged(self.ids, self.positions, cache, metadata)
        return self.model.logits(hidden)

    @torch.inference_mode()
    def single_launch(self, bound):
        bound(
            self.ids, self.positions, self.earlier, self.slots, self.table, self.model.rope_tables, self.logits,
            self.tokens, self.logprobs, self.sampled, self.sampled_rows,
        )  # fmt: skip
        return self.logits.clone()


def assert_same_rows(found, truth, plain, kv_dtype):
    """Compare a layer's keys and values with those of separate layers; in FP8 either neighbour of a tie is right."""
    if kv_dtype is None:
        assert_no_worse_than(found, truth, plain, factor=3.0)
        return
    allowed = 3.0 * (plain - truth).abs().max() + truth.abs() / 8
    assert ((found - truth).abs() <= allowed).all()


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [
        *itertools.product(sorted(set(MODELS) - set(SHAPES)), (torch.bfloat16, torch.float16)),
        *itertools.product((*SHAPES, "Llama-3.1-8B"), (torch.bfloat16,)),
    ],
    ids=str,
)
def test_it_is_as_accurate_as_separate_layers_and_writes_the_same_cache(name, dtype, kv_dtype):
    model = build(name, dtype)
    wide = build(name, torch.float32)
    wide.load_state_dict(model.state_dict())
    one_cache = new_cache(model, kv_dtype)
    one = bind_single_launch(model, one_cache)
    for context in CONTEXTS:
        cache, truth_cache = new_cache(model, kv_dtype), new_cache(wide, kv_dtype)
        step = Step(model, context)
        plain, truth = step.by_layers(cache), Step(wide, context).by_layers(truth_cache)

        found = step.single_launch(one)

        assert_no_worse_than(found.float(), truth, plain.float(), factor=3.0)
        for layer in range(len(model.network.layers)):
            assert_same_rows(
                *(rows_of(c, layer) for c in (one_cache, truth_cache, cache)), kv_dtype
            )
        fill(one_cache)
        assert step.tokens.item() == step.sampled[0].item() == found.float().argmax().item()
        torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


@pytest.mark.parametrize("num_sms", [16, 78, 114])
@pytest.mark.parametrize(
    "name",
    [
        "qwen", "llama", "groups of 7", "groups of 8", "wide", "windows in two of three layers", "gemma-3-1b",
        "gemma-3-270m",
    ],
)  # fmt: skip
def test_it_is_as_accurate_with_fewer_programs(monkeypatch, name, num_sms):
    arch = dataclasses.replace(detect("cuda"), num_sms=num_sms)
    monkeypatch.setattr("model.network.parameters.detect", lambda _device: arch)
    model = build(name, torch.bfloat16)
    wide = build(name, torch.float32)
    wide.load_state_dict(model.state_dict())
    cache = new_cache(model)
    one = bind_single_launch(model, cache)
    for context in (1, 65, 511, 4000):
        fill(cache)
        step = Step(model, context)
        plain = step.by_layers(new_cache(model))
        truth = Step(wide, context).by_layers(new_cache(wide))

        assert_no_worse_than(step.single_launch(one).float(), truth, plain.float(), factor=3.0)


@pytest.mark.parametrize(
    "name", ["groups of 3", "windows in two of three layers", "gemma-3-270m", "gemma-3-1b"]
)
def test_sequences_of_other_lengths_may_alternate(name):
    model = build(name, torch.bfloat16)
    one = bind_single_launch(model, new_cache(model))
    steps = [Step(model, context, write=False) for context in (1500, 40, 700, 1, 3000, 129)]
    expected = [step.single_launch(one) for step in steps]

    for number in [5, 0, 1, 4, 3, 2, 0, 0, 3, 4, 5, 1] * 10:
        assert torch.equal(steps[number].single_launch(one), expected[number])


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(
    "name", ["qwen", "biased", "groups of 3", "wide", "gemma-3-1b", "gemma-3-270m"]
)
def test_repeats_and_graph_replays_give_the_same_bits(name, kv_dtype):
    model = build(name, torch.bfloat16)
    one = bind_single_launch(model, new_cache(model, kv_dtype))
    step = Step(model, 700)
    first = step.single_launch(one)
    logprob = step.logprobs.clone()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        step.single_launch(one)

    for _ in range(100):
        assert torch.equal(step.single_launch(one), first)
        assert torch.equal(step.logprobs, logprob)
        graph.replay()
        assert torch.equal(step.logits, first)
        assert torch.equal(step.logprobs, logprob)


def test_a_negative_id_reads_a_token_sampled_by_the_step_before():
    model = build("qwen", torch.bfloat16)
    one = bind_single_launch(model, new_cache(model))
    step = Step(model, 40)
    expected = step.single_launch(one)
    step.sampled[3] = step.ids[0]
    step.ids.fill_(-1 - 3)

    assert torch.equal(step.single_launch(one), expected)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
def test_a_negative_slot_writes_nothing(kv_dtype):
    model = build("qwen", torch.bfloat16)
    cache, untouched = new_cache(model, kv_dtype), new_cache(model, kv_dtype)
    Step(model, 100, write=False).single_launch(bind_single_launch(model, cache))

    for found, expected in zip(cache.layers, untouched.layers, strict=True):
        assert torch.equal(found.view(torch.uint8), expected.view(torch.uint8))
    for found, expected in zip(cache.scales, untouched.scales, strict=True):
        assert found is expected is None or torch.equal(found, expected)


def test_keys_are_rotated_and_keys_and_values_quantized_as_in_pytorch():
    model = build("qwen", torch.bfloat16)
    cache, exact = new_cache(model, FP8), new_cache(model)
    step = Step(model, 1)
    step.single_launch(bind_single_launch(model, cache))
    step.single_launch(bind_single_launch(model, exact))

    # Before quantization the first layer's keys and values are equal in both caches.
    at = divmod(int(step.slots), BLOCK)
    keys, values = exact.layers[0][:, *at].cpu()
    numbers, scales = cache.layers[0][:, *at].cpu(), cache.scales[0][:, at[0], :, at[1]].cpu()
    expected, expected_scales = quantize_kv_rows(values)
    assert torch.equal(numbers[1].view(torch.uint8), expected.view(torch.uint8))
    assert torch.equal(scales[1], expected_scales)
    rotated = hadamard_transform(keys.float())
    error = (dequantize_rows(numbers[0], scales[0], torch.float32) - rotated).abs()
    assert bool((error <= rotated.abs() * (1 / 16 + 2**-7) + scales[0][:, None] * 2**-9).all())


@pytest.mark.parametrize("bad", [float("nan"), float("inf")])
def test_non_finite_logits_give_token_minus_one(bad):
    model = build("qwen", torch.bfloat16)
    model.norm[5] = bad
    step = Step(model, 20)
    step.single_launch(bind_single_launch(model, new_cache(model)))

    assert step.tokens.item() == -1
    assert 0 <= step.sampled[0].item() < model.network.vocab


def test_equal_logits_choose_the_smallest_id():
    model = build("llama", torch.bfloat16)
    model.lm_head.zero_()
    step = Step(model, 20)
    step.single_launch(bind_single_launch(model, new_cache(model)))

    assert step.tokens.item() == step.sampled[0].item() == 0
    torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


def test_logits_of_minus_infinity_do_not_change_the_log_probability():
    model = build("llama", torch.bfloat16)
    step = Step(model, 20)
    one = bind_single_launch(model, new_cache(model))
    # All logits except the first program's equal one element of the hidden state, then minus infinity.
    model.lm_head[8:] = 0.0
    model.lm_head[8:, 0] = 1.0
    sign = step.single_launch(one)[0, 8].sign()
    model.lm_head[8:, 0] = -float("inf") * sign
    step.single_launch(one)

    assert step.logits[0, 8:].max() == -float("inf")
    assert 0 <= step.tokens.item() < 8
    torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


SEVERAL = (64, 1, 511, 1500, 2, 65, 31, 1024)
"""Contexts of a step of several sequences."""
FOUR_ROWS = {"wide", "long"}
ONE_ROW = {*FOUR_ROWS, *GEMMAS}
"""Models that are no single launch for 8 sequences; some are for 4."""
CHAINS = (((63, 8),), ((1, 4), (500, 4)), ((1020, 3), (31, 5)), ((7, 2), (64, 1), (255, 5)))
"""Steps of 8 rows: the context of each sequence's first token, and its tokens."""


def rows_supported(name, rows, arch):
    """Return whether a model's steps of several sequences are single launches."""
    config = MODELS[name]
    problem = ModelProblem(
        config.network, "bfloat16", unquantized(torch.bfloat16), arch, unmeasured=True
    )
    return not single_launch.unsupported(problem, rows)


def test_the_models_of_the_tests_of_several_sequences_are_supported():
    unsupported = {name for name in MODELS if not rows_supported(name, 8, detect("cuda"))}

    assert unsupported == ONE_ROW


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("weight_format", [None, FP8_WEIGHTS], ids=["full", "fp8"])
@pytest.mark.parametrize(
    ("name", "rows"),
    [
        *((name, 8) for name in sorted(set(MODELS) - ONE_ROW)),
        *itertools.product(("qwen", "groups of 3", *sorted(FOUR_ROWS)), (2, 4)),
    ],
)
def test_several_sequences_are_as_accurate_as_separate_layers(name, rows, weight_format, kv_dtype):
    model = build(name, torch.bfloat16, weight_format)
    wide = in_float32(model)
    own_cache = new_cache(model, kv_dtype)
    bound = bind_single_launch(model, own_cache, rows)
    for shift in (0, 3, 100):
        contexts = [context + shift for context in SEVERAL[:rows]]
        cache, truth_cache = new_cache(model, kv_dtype), new_cache(wide, kv_dtype)
        step = RowsStep(model, contexts)
        plain, truth = step.by_layers(cache), RowsStep(wide, contexts).by_layers(truth_cache)

        found = step.single_launch(bound)

        assert_no_worse_than(found.float(), truth, plain.float(), factor=3.0)
        for layer in range(len(model.network.layers)):
            assert_same_rows(
                *(rows_of(c, layer) for c in (own_cache, truth_cache, cache)), kv_dtype
            )
        fill(own_cache)
        assert torch.equal(step.tokens, found.float().argmax(-1))
        assert torch.equal(step.sampled[2 : 2 + rows], step.tokens)
        expected = found.double().log_softmax(-1).amax(-1)
        torch.testing.assert_close(step.logprobs.double(), expected, **CLOSE)


@pytest.mark.parametrize("num_sms", [78, 114])
@pytest.mark.parametrize("name", ["qwen", "groups of 7"])
def test_several_sequences_are_as_accurate_with_fewer_programs(monkeypatch, name, num_sms):
    arch = dataclasses.replace(detect("cuda"), num_sms=num_sms)
    monkeypatch.setattr("model.network.parameters.detect", lambda _device: arch)
    model, wide = build(name, torch.bfloat16), build(name, torch.float32)
    wide.load_state_dict(model.state_dict())
    step = RowsStep(model, SEVERAL)
    plain = step.by_layers(new_cache(model))
    truth = RowsStep(wide, SEVERAL).by_layers(new_cache(wide))

    found = step.single_launch(bind_single_launch(model, new_cache(model), 8))

    assert_no_worse_than(found.float(), truth, plain.float(), factor=3.0)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("weight_format", [None, FP8_WEIGHTS], ids=["full", "fp8"])
@pytest.mark.parametrize("name", ["qwen", "biased", "groups of 3", "heads of 80"])
def test_repeats_and_graph_replays_of_several_sequences_give_the_same_bits(
    name, weight_format, kv_dtype
):
    model = build(name, torch.bfloat16, weight_format)
    bound = bind_single_launch(model, new_cache(model, kv_dtype), 8)
    steps = [RowsStep(model, contexts, write=False) for contexts in (SEVERAL, SEVERAL[::-1])]
    expected = [step.single_launch(bound) for step in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[0].single_launch(bound)

    for number in [0, 1, 1, 0, 0, 0, 1] * 30:
        assert torch.equal(steps[number].single_launch(bound), expected[number])
        graph.replay()
        assert torch.equal(steps[0].logits, expected[0])


def test_a_sequence_has_the_same_bits_beside_any_others():
    model = build("qwen", torch.bfloat16)
    bound = bind_single_launch(model, new_cache(model), 4)
    step = RowsStep(model, (700, 40, 65, 1), write=False)
    first = step.single_launch(bound)[2]
    step.positions[[0, 1, 3]] = torch.tensor([9, 3, 0], device="cuda")
    step.ids[[0, 1, 3]] = 77

    assert torch.equal(step.single_launch(bound)[2], first)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("name", sorted(set(MODELS) - ONE_ROW))
def test_a_row_has_the_same_bits_however_many_there_are(name, kv_dtype):
    model = build(name, torch.bfloat16)
    cache = new_cache(model, kv_dtype)
    bound = {rows: bind_single_launch(model, cache, rows) for rows in (1, 2, 4, 8)}
    for shift in (0, 5, 50):
        contexts = [context + shift for context in SEVERAL]
        step = RowsStep(model, contexts, write=False)
        expected, logprobs = step.single_launch(bound[8]), step.logprobs.clone()
        for rows in (1, 2, 4):
            for first in range(0, 8, rows):
                some = RowsStep(model, contexts[first : first + rows], write=False)
                some.table = step.table[first : first + rows].contiguous()
                found = some.single_launch(bound[rows])
                assert torch.equal(found, expected[first : first + rows]), (rows, first)
                assert torch.equal(some.logprobs, logprobs[first : first + rows])


class Chain(RowsStep):
    """A step with several tokens of each sequence; `chain` has their contexts and counts."""

    def __init__(self, model, chain):
        super().__init__(model, [first + i for first, count in chain for i in range(count)])
        generator = torch.Generator().manual_seed(len(chain))
        blocks = torch.randperm(BLOCKS, generator=generator).int()
        row = 0
        for first, count in chain:
            own, blocks = blocks[: self.table.shape[1]], blocks[self.table.shape[1] :]
            for i in range(count):
                self.table[row] = own
                self.earlier[row] = i
                position = first - 1 + i
                self.slots[row] = int(own[position // BLOCK]) * BLOCK + position % BLOCK
                row += 1

    def alone(self, row):
        """Return the same step of one of the rows."""
        one = RowsStep(self.model, self.contexts[row : row + 1])
        one.ids, one.slots = self.ids[row : row + 1], self.slots[row : row + 1]
        one.table = self.table[row : row + 1].contiguous()
        return one


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("name", sorted(set(MODELS) - ONE_ROW))
def test_tokens_of_one_sequence_have_the_bits_of_single_steps(name, kv_dtype):
    model = build(name, torch.bfloat16)
    cache, by_one = new_cache(model, kv_dtype), new_cache(model, kv_dtype)
    eight, one = bind_single_launch(model, cache, 8), bind_single_launch(model, by_one, 1)
    for chain in CHAINS:
        step = Chain(model, chain)
        found = step.single_launch(eight)
        for row in range(8):
            single = step.alone(row)
            assert torch.equal(single.single_launch(one)[0], found[row]), (chain, row)
            assert torch.equal(single.logprobs[0], step.logprobs[row])
        for layer, other in zip(cache.layers, by_one.layers, strict=True):
            assert torch.equal(layer.view(torch.uint8), other.view(torch.uint8))
        for scale, other in zip(cache.scales, by_one.scales, strict=True):
            assert scale is other is None or torch.equal(scale, other)


def require_accuracy(model, kv_dtype):
    """Require a single launch to be as accurate as separate layers, and to write the same cache."""
    wide = in_float32(model)
    one_cache = new_cache(model, kv_dtype)
    one = bind_single_launch(model, one_cache)
    for context in CONTEXTS:
        cache, truth_cache = new_cache(model, kv_dtype), new_cache(wide, kv_dtype)
        step = Step(model, context)
        plain, truth = step.by_layers(cache), Step(wide, context).by_layers(truth_cache)

        found = step.single_launch(one)

        assert_no_worse_than(found.float(), truth, plain.float(), factor=3.0)
        for layer in range(len(model.network.layers)):
            assert_same_rows(
                *(rows_of(c, layer) for c in (one_cache, truth_cache, cache)), kv_dtype
            )
        fill(one_cache)
        assert step.tokens.item() == step.sampled[0].item() == found.float().argmax().item()
        torch.testing.assert_close(step.logprobs.double(), step.true_logprob(), **CLOSE)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize(
    ("name", "dtype"),
    [("qwen", torch.float16), *((name, torch.bfloat16) for name in MOST)],
    ids=str,
)
def test_fp8_weights_are_as_accurate_as_separate_layers_and_write_the_same_cache(
    name, dtype, kv_dtype
):
    require_accuracy(build(name, dtype, FP8_WEIGHTS), kv_dtype)


@pytest.mark.parametrize("weight_format", [None, FP8_WEIGHTS], ids=["full", "fp8"])
@pytest.mark.parametrize(
    ("name", "num_sms"),
    [
        *itertools.product(("qwen", "llama", "groups of 7"), (16, 78, 114)),
        *itertools.product(("Llama-3.1-8B",), (78, 114)),
    ],
)
def test_weights_in_fp8_are_as_accurate_with_fewer_programs(
    monkeypatch, name, num_sms, weight_format
):
    arch = dataclasses.replace(detect("cuda"), num_sms=num_sms)
    model = build(name, torch.bfloat16, weight_format)
    wide = in_float32(model)
    monkeypatch.setattr("model.network.parameters.detect", lambda _device: arch)
    cache = new_cache(model)
    one = bind_single_launch(model, cache)
    for context in (1, 65, 511, 4000):
        fill(cache)
        step = Step(model, context)
        plain = step.by_layers(new_cache(model))
        truth = Step(wide, context).by_layers(new_cache(wide))

        assert_no_worse_than(step.single_launch(one).float(), truth, plain.float(), factor=3.0)


@pytest.mark.parametrize("kv_dtype", [None, FP8])
@pytest.mark.parametrize("weight_format", [None, FP8_WEIGHTS], ids=["full", "fp8"])
@pytest.mark.parametrize("name", ["qwen", "biased", "groups of 3", "Llama-3.1-8B"])
def test_weights_in_fp8_give_the_same_bits_in_repeats_and_graph_replays(
    name, weight_format, kv_dtype
):
    model = build(name, torch.bfloat16, weight_format)
    one = bind_single_launch(model, new_cache(model, kv_dtype))
    steps = [Step(model, context, write=False) for context in (700, 40)]
    expected = [step.single_launch(one) for step in steps]
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps[0].single_launch(one)

    for number in [0, 1, 1, 0, 0, 0, 1] * 20:
        assert torch.equal(steps[number].single_launch(one), expected[number])
        graph.replay()
        assert torch.equal(steps[0].logits, expected[0])


@pytest.mark.parametrize("exponent", [-8, 8])
def test_vectors_of_fp8_weights_on_tensor_cores_may_be_small_or_large(exponent):
    model = build("Llama-3.1-8B", torch.bfloat16, FP8_WEIGHTS)
    for layer in model.decoder_layers:
        # The attended values and the gated product are smaller or larger by as much, their projections the reverse.
        layer.mlp_norm.mul_(2.0 ** (exponent / 2))
        layer.down.scale.mul_(2.0**-exponent)
        layer.qkv.scale[-1024:] *= 2.0**exponent
        layer.output.scale.mul_(2.0**-exponent)
    require_accuracy(model, None)


def test_fp8_weights_reach_the_single_launch_in_an_engine(monkeypatch):
    prompt, tokens = [(7 * i) % 500 + 5 for i in range(40)], []
    for largest, graphs in ((0, True), (4096, False), (4096, True)):
        monkeypatch.setattr("kernels.step.single_launch._MOST_HIDDEN", largest)
        engine = LocalEngine(
            EngineConfig(
                model_path=str(resolve(BUNDLED)),
                model_id=BUNDLED,
                device="cuda",
                dtype="bfloat16",
                quantization="fp8",
                kv_cache_tokens=4096,
                max_num_seqs=2,
                max_num_batched_tokens=512,
                cuda_graphs=graphs,
            )
        )
        while engine.engine._runner.use_idle_time():
            pass
        assert engine.engine.info.plan.one_sequence.startswith(
            "in one launch; 2, 4, 8 sequences in one launch"
            if largest
            else "layer by layer: a hidden size of"
        )
        sampling = SamplingParams(max_new_tokens=64, temperature=0.0)
        asked = GenerateRequest(request_id=0, prompt_token_ids=prompt, sampling=sampling)
        (events,) = engine.generate([asked])
        tokens.append([event.token_id for event in events])
        del engine
        gc.collect()
        torch.cuda.empty_cache()

    by_layers, one_by_one, recorded = tokens
    assert one_by_one == recorded
    assert by_layers[:2] == recorded[:2]


def test_the_shapes_of_these_models_are_supported():
    for name in MODELS:
        assert single_launch.unsupported(problem_of(build(name, torch.bfloat16))) == ()
    weight_formats = (unquantized(torch.bfloat16), FP8_WEIGHTS)
    for config, weight_format in itertools.product(FP8_MODELS.values(), weight_formats):
        problem = ModelProblem(
            config.network, "bfloat16", weight_format, detect("cuda"), unmeasured=True
        )
        assert not single_launch.unsupported(problem)

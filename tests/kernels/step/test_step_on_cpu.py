"""The single-launch decode step on a CPU, of one sequence as a control and of several, against float64."""

import dataclasses
import types

import pytest
import torch

from kernels.fp8 import quantize_kv_rows
from kernels.hadamard import hadamard_transform
from kernels.step.single_launch import (
    LayerWeights,
    StepShape,
    StepWeights,
    computed_as_rows,
    unsupported,
)
from kernels.step.weights import MATRICES
from kernels.weight_format import FP8_ROWS, WeightFormat
from kernels.weights import Weight, quantize
from tests.kernels.compile.cross_compile_jobs import ARCHES
from tests.kernels.references.reference_fp8 import dequantize_rows
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

if HAS_TRITON:
    from kernels.step.gpu import kernel
    from kernels.step.gpu.kernel_rows import RowsKernel
    from tests.kernels.step.step_on_cpu import steps_on_cpu

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host"),
    pytest.mark.timeout(240),
]

BLOCK, BLOCKS = 16, 12
POSITIONS = (100, 0, 33, 64, 65, 1, 31, 150)
MOST = 200
"""Positions that have a rotation."""
POST_NORMS, GELU_TANH, LOCAL_ROPE, FACTOR, FLOAT32_NORMS = GEMMA = (
    "post norms", "gelu_tanh", "local rope", "factor", "float32 norms",
)  # fmt: skip
"""What the layers of Gemma 3 have beyond those of Qwen 3."""


@dataclasses.dataclass(frozen=True)
class Case:
    """A model and a step."""

    rows: int
    num_sms: int = 16
    hidden: int = 128
    inner: int = 192
    heads: int = 4
    kv_heads: int = 2
    dim: int = 32
    layers: int = 2
    vocab: int = 101
    around: bool = True
    window: int | None = None
    fp8: bool = False
    early: bool = True
    fp8_weights: bool = False
    parts: tuple[str, ...] = ()
    form: WeightFormat | None = None

    @property
    def shape(self):
        sizes = (self.hidden, self.inner, self.heads, self.kv_heads, self.dim, self.vocab)
        activation = "gelu_tanh" if GELU_TANH in self.parts else "silu"
        factor = self.hidden**0.5 if FACTOR in self.parts else 1.0
        return StepShape(
            *sizes, 1e-6, self.dim**-0.5, activation, factor, post_norms=POST_NORMS in self.parts,
            float32_norms=FLOAT32_NORMS in self.parts, local_rope=LOCAL_ROPE in self.parts,
        )  # fmt: skip

    @property
    def as_rows(self):
        """Whether a step of one row is computed as one of several is."""
        return computed_as_rows(self.shape, self.rows, FP8_ROWS if self.fp8_weights else self.form)

    @property
    def arch(self):
        return dataclasses.replace(ARCHES[90], num_sms=self.num_sms)


INT4, INT4_SHIFTS, INT4_WIDE, INT4_64 = (
    WeightFormat("int4", 4, 128, "group", False, False, 8, "float16"),
    WeightFormat("int4", 4, 32, "group", True, False, 0, "float32"),
    WeightFormat("int4", 4, 512, "group", True, False, 8, "bfloat16"),
    WeightFormat("int4", 4, 64, "group", False, False, 0, "bfloat16"),
)
INT4_WEIGHTS = (
    Case(1, form=INT4, dim=128, inner=1088, layers=3),
    Case(1, form=INT4_SHIFTS, hidden=320, inner=576, heads=8, dim=64, num_sms=23),
    Case(1, form=INT4_WIDE, hidden=2112, inner=4160, heads=8, dim=64, layers=1, num_sms=20),
    Case(1, form=INT4_SHIFTS, hidden=1088, inner=2176, dim=128, layers=1, early=False, num_sms=20),
    Case(1, form=INT4_64, hidden=4096, inner=2048, dim=256, kv_heads=1, layers=1, num_sms=20),
)
FP8_BLOCKS, FP8_GROUPS, FP8_WIDE = (
    WeightFormat("fp8-blocks", 8, 128, "block"),
    WeightFormat("fp8-groups", 8, 128, "group", scale_dtype="bfloat16"),
    WeightFormat("fp8-blocks", 8, 384, "block"),
)
FP8_IN_GROUPS = (
    Case(1, form=FP8_BLOCKS),
    Case(1, form=FP8_GROUPS, hidden=320, inner=576, heads=6, dim=48, fp8=True, num_sms=23),
    Case(1, form=FP8_BLOCKS, hidden=192, heads=3, kv_heads=1, dim=64, inner=1536, around=False, window=40),
    Case(1, form=FP8_WIDE, hidden=1088, inner=2176, layers=1, early=False, num_sms=20),
    Case(1, form=FP8_BLOCKS, hidden=2112, inner=4160, layers=1, num_sms=20),
    Case(1, form=FP8_BLOCKS, hidden=1024, inner=8256, layers=1, num_sms=20),
    Case(1, form=FP8_GROUPS, hidden=4096, inner=2048, layers=1, num_sms=20),
    Case(1, form=FP8_BLOCKS, parts=GEMMA, window=40, hidden=1152),
)  # fmt: skip
FP8_WEIGHTS = (
    Case(1, fp8_weights=True),
    Case(1, fp8_weights=True, hidden=320, inner=576, heads=6, dim=48, fp8=True, num_sms=23),
    Case(
        1,
        fp8_weights=True,
        hidden=192,
        heads=3,
        kv_heads=1,
        dim=64,
        inner=1536,
        around=False,
        window=40,
    ),
    Case(1, fp8_weights=True, hidden=1088, inner=2176, layers=1, early=False, num_sms=20),
    Case(1, fp8_weights=True, hidden=2112, inner=4160, layers=1, fp8=True, num_sms=20),
    Case(1, fp8_weights=True, hidden=4096, inner=2048, layers=1, num_sms=20),
)
FP8_WEIGHTS_OF_ROWS = (
    Case(8, fp8_weights=True),
    Case(2, fp8_weights=True, hidden=1088, inner=2176, layers=1, early=False, num_sms=20),
    Case(4, fp8_weights=True, heads=6, dim=48, hidden=192, inner=1088, around=False, window=40, num_sms=13),
    Case(2, fp8_weights=True, hidden=2048, inner=4672, layers=1, num_sms=20),
    Case(4, fp8_weights=True, inner=8256, layers=1, num_sms=20),
    Case(2, fp8_weights=True, fp8=True, hidden=320, inner=576, num_sms=23, early=False),
)  # fmt: skip
ALONE = (
    Case(1),
    Case(1, hidden=320, inner=576, heads=6, dim=48, fp8=True, num_sms=23),
    Case(1, hidden=192, heads=3, kv_heads=1, dim=64, inner=1536, around=False, window=40),
    Case(1, hidden=1088, inner=2176, layers=1, early=False, num_sms=20),
    Case(1, hidden=4096, inner=1088, layers=1, num_sms=20),
    Case(1, inner=4160, layers=1, num_sms=20),
)
GEMMAS = (
    Case(1, parts=GEMMA, window=40),
    Case(1, parts=GEMMA, kv_heads=1, dim=256, window=40, layers=3),
    Case(1, parts=GEMMA, hidden=1152, kv_heads=1, dim=256, window=40, layers=3),
    Case(1, parts=GEMMA, hidden=2112, inner=640, window=40, num_sms=20, fp8=True),
    Case(1, parts=GEMMA, window=40, fp8_weights=True, fp8=True),
    Case(1, parts=GEMMA, window=40, fp8_weights=True, hidden=1152),
    Case(1, parts=GEMMA, window=40, early=False, num_sms=23, around=False),
    *(Case(1, parts=(part,), window=40, around=False) for part in GEMMA),
)
CASES = (
    Case(1),
    Case(8),
    Case(2, num_sms=23),
    Case(4, heads=6, dim=48, hidden=192, inner=320, around=False, window=40, num_sms=11),
    Case(8, fp8=True, early=False),
    Case(1, fp8=True),
    Case(2, hidden=1088, inner=2176, layers=1, early=False, num_sms=20),
    Case(4, heads=10, num_sms=40, vocab=640),
    Case(8, heads=3, kv_heads=1, dim=64, hidden=192, inner=1536, num_sms=9),
    *INT4_WEIGHTS,
    *FP8_IN_GROUPS,
    *FP8_WEIGHTS,
    *FP8_WEIGHTS_OF_ROWS,
    *GEMMAS,
    *ALONE,
)


GENERATOR = torch.Generator().manual_seed(0)


def random(*shape, std=0.1):
    return (torch.randn(shape, generator=GENERATOR) * std).bfloat16()


def in_fp8(layer):
    """Round a layer's matrices to FP8; the scales of neighbouring rows differ by a factor of about 2 or 4."""
    quantized = {}
    for name in MATRICES:
        matrix = getattr(layer, name).numbers
        apart = torch.exp2(torch.arange(len(matrix)) % 3 - 1.0)[:, None]
        quantized[name] = quantize(matrix * apart, FP8_ROWS)
    return layer._replace(**quantized)


def in_groups(layer, form):
    """Return a layer with random matrices in groups of the same shapes and standard deviations."""
    made = {}
    for name in MATRICES:
        matrix = getattr(layer, name)
        weight = Weight.empty(form, matrix.shape, "cpu")
        size = torch.rand(weight.scale.shape, generator=GENERATOR) + 0.5
        deviation = 100.0 if form.float else 4.6
        if form.float:
            numbers = torch.randn(matrix.shape, generator=GENERATOR) * deviation
            weight.numbers.copy_(numbers.clamp(-448, 448))
            # Scales of neighbouring groups differ by a factor of up to 4.
            size[..., ::2] /= 4
        else:
            weight.numbers.random_(0, 256, generator=GENERATOR)
        weight.scale.copy_(size * matrix.numbers.float().std() / deviation)
        if weight.shift is not None:
            weight.shift.copy_(weight.scale.float() * (form.offset - 7.5))
        made[name] = weight
    return layer._replace(**made)


def wide_matrix(layer, name):
    """Return a layer's matrix, float64."""
    weight = getattr(layer, name)
    if weight.format.group:
        return weight.dequantize().double()
    numbers = weight.numbers.double()
    return numbers if weight.scale is None else numbers * weight.scale.double()[:, None]


class Model:
    """Random weights, a cache, and the inputs of a step of each number of sequences."""

    def __init__(self, case):
        GENERATOR.manual_seed(0)
        self.case = case
        c, heads, kv, dim = case.hidden, case.heads, case.kv_heads, case.dim
        stacked = (heads + 2 * kv) * dim

        def gain(size):
            wide = FLOAT32_NORMS in case.parts
            return 1 + (random(size, std=0.3).float() / 3 if wide else random(size))

        def layer(number):
            norms = [gain(dim) if case.around else None for _ in range(2)]
            post_norms = [gain(c) if POST_NORMS in case.parts else None for _ in range(2)]
            return LayerWeights(
                *map(Weight.full, (random(stacked, c), random(c, heads * dim), random(2 * case.inner, c),
                random(c, case.inner, std=0.05))), gain(c), gain(c), *norms,
                random(stacked) if case.around else None, case.window if number % 2 else None, *post_norms,
            )  # fmt: skip

        layers = [layer(number) for number in range(case.layers)]
        if case.fp8_weights:
            layers = [in_fp8(it) for it in layers]
        if case.form is not None:
            layers = [in_groups(it, case.form) for it in layers]
        embedding = random(case.vocab, c, std=1.0)
        head = random(case.vocab, c, std=0.5 * c**-0.5)
        self.weights = StepWeights(case.shape, layers, embedding, head, gain(c))
        rows = [random(2, BLOCKS, BLOCK, kv, dim, std=1.0) for _ in layers]
        self.scales = (None,) * case.layers
        self.caches = tuple(rows)
        if case.fp8:
            quantized = [quantize_kv_rows(it) for it in rows]
            self.caches = tuple(numbers for numbers, _ in quantized)
            self.scales = tuple(it.transpose(2, 3).contiguous() for _, it in quantized)
        tables = 4 if LOCAL_ROPE in case.parts else 2
        self.rope = tuple(random(MOST, 1, dim, std=1.0).contiguous() for _ in range(tables))
        self.positions = torch.tensor(POSITIONS)[: case.rows]
        self.ids = torch.arange(case.rows) * 7 % case.vocab
        self.table = torch.stack(
            [torch.randperm(BLOCKS, generator=GENERATOR) for _ in POSITIONS]
        ).int()[: case.rows]
        self.slots = torch.full((case.rows,), -1, dtype=torch.int32)
        self.earlier = torch.zeros(case.rows, dtype=torch.int32)
        self.sampled = torch.zeros(20, dtype=torch.int64)

    def rows_of(self, layer):
        """Return the keys and values of a layer's cache, [2, N, S, K, D] float64."""
        scale = self.scales[layer]
        if scale is None:
            return self.caches[layer].double()
        return dequantize_rows(self.caches[layer], scale.transpose(2, 3), torch.float32).double()

    def bind(self):
        given = (self.weights, self.caches, self.scales, self.case.arch)
        return (
            RowsKernel(*given, self.case.rows) if self.case.as_rows else kernel.StepKernel(*given)
        )

    def step(self, bound):
        """Compute a step on the CPU; returns its logits, tokens and log-probabilities."""
        rows = self.case.rows
        logits = torch.full((rows, self.case.vocab), torch.nan).bfloat16()
        tokens, logprobs = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)
        as_rows = self.case.as_rows
        given = (
            self.ids,
            self.positions,
            *((self.earlier,) if as_rows else ()),
            self.slots,
            self.table,
            self.rope,
            logits,
            tokens,
            logprobs,
            self.sampled,
        )
        with steps_on_cpu(self.weights, self.caches, self.scales):
            bound(*given, torch.arange(rows) + 3) if as_rows else bound(*given)
        return types.SimpleNamespace(logits=logits.double(), tokens=tokens, logprobs=logprobs)

    def truth(self):
        """Return the logits in float64, and each layer's keys and values of the step's tokens, [2, B, K, D]."""
        case, written = self.case, []
        wide = torch.Tensor.double
        x = wide(self.weights.embedding)[self.ids]
        x = x * torch.tensor(case.shape.embedding_factor).bfloat16().double()
        for number, layer in enumerate(self.weights.layers):
            y = _norm(x, wide(layer.input_norm)) @ wide_matrix(layer, "qkv").T
            y = y if layer.qkv_bias is None else y + wide(layer.qkv_bias)
            q, k, v = y.view(case.rows, -1, case.dim).split(
                [case.heads, case.kv_heads, case.kv_heads], 1
            )
            if case.around:
                q, k = _norm(q, wide(layer.q_norm)), _norm(k, wide(layer.k_norm))
            q, k = self._rotated(q, layer), self._rotated(k, layer)
            if case.fp8:
                q, k = (hadamard_transform(it.float()).double() for it in (q, k))
            written.append(torch.stack([k, v]))
            attended = [
                self._attend(number, row, q[row], k[row], v[row]) for row in range(case.rows)
            ]
            y = torch.stack(attended) @ wide_matrix(layer, "output").T
            x = x + (y if layer.output_norm is None else _norm(y, wide(layer.output_norm)))
            y = _norm(x, wide(layer.mlp_norm)) @ wide_matrix(layer, "gate_up").T
            gate, up = y.chunk(2, -1)
            if GELU_TANH in case.parts:
                gate = torch.nn.functional.gelu(gate, approximate="tanh")
            else:
                gate = torch.nn.functional.silu(gate)
            y = (gate * up) @ wide_matrix(layer, "down").T
            x = x + (y if layer.down_norm is None else _norm(y, wide(layer.down_norm)))
        return _norm(x, wide(self.weights.norm)) @ wide(self.weights.head).T, written

    def _rotated(self, x, layer):
        tables = self.rope[-2:] if layer.window else self.rope[:2]
        cos, sin = (it.double()[self.positions] for it in tables)
        return x * cos + x.roll(self.case.dim // 2, -1) * sin

    def _attend(self, number, row, q, k, v):
        past = int(self.positions[row])
        before = self.rows_of(number)[:, self.table[row].long()].flatten(1, 2)[:, :past]
        window = self.weights.layers[number].window
        before = before[:, max(past + 1 - window, 0) :] if window else before
        group = self.case.heads // self.case.kv_heads
        keys, values = (
            torch.cat([old, new[None]]).repeat_interleave(group, 1)
            for old, new in zip(before, (k, v), strict=True)
        )
        scores = torch.einsum("hd,nhd->hn", q, keys) * self.case.dim**-0.5
        return torch.einsum("hn,nhd->hd", scores.softmax(-1), values).flatten()


def _norm(x, gain):
    return x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt() * gain


def assert_close(found, truth, most):
    """Require the norm of each row's error to be a small part of the row's."""
    error = (found - truth).norm(dim=-1) / truth.norm(dim=-1)
    assert error.max() < most, error


@pytest.fixture
def model(request, monkeypatch):
    case = request.param
    if not case.early:
        monkeypatch.setattr(kernel, "_LITTLE_HIDDEN", 0)
    form = FP8_ROWS if case.fp8_weights else case.form
    assert not unsupported(case.shape, torch.bfloat16, case.arch, case.rows, form)
    return Model(case)


@pytest.mark.parametrize(
    "model",
    slow_except(
        (
            *CASES[:2],
            *INT4_WEIGHTS[:2],
            *FP8_IN_GROUPS[:1],
            *FP8_WEIGHTS[:1],
            *FP8_WEIGHTS_OF_ROWS[:1],
            *ALONE[:1],
            *GEMMAS[:3],
        ),
        CASES,
    ),
    indirect=True,
    ids=str,
)
def test_several_steps_agree_with_float64(model):
    bound = model.bind()
    allowed = 0.06 if model.case.fp8 else 0.03
    # A part of Gemma changes less than what errors may add up to in other models.
    allowed = 0.012 if model.case.parts else allowed
    for shift in (0, 20):
        model.positions = (torch.tensor(POSITIONS)[: model.case.rows] + shift).clamp(min=0)
        truth, _ = model.truth()
        step = model.step(bound)

        assert_close(step.logits, truth, allowed)
        assert torch.equal(step.tokens, step.logits.argmax(-1))
        expected = step.logits.log_softmax(-1).amax(-1).float()
        torch.testing.assert_close(step.logprobs, expected, rtol=1e-4, atol=1e-4)
        first = 3 if model.case.as_rows else 0
        assert torch.equal(model.sampled[first : first + model.case.rows], step.tokens)


@pytest.mark.parametrize("model", [Case(4, layers=1)], indirect=True, ids=str)
def test_keys_and_values_are_written_to_the_slots_and_nowhere_else(model):
    model.table = torch.arange(BLOCKS).int().repeat(4, 1)
    # The last block of the table belongs to the third sequence, the one before to the first.
    model.slots = torch.tensor([10 * BLOCK + 3, -1, 11 * BLOCK + 15, -1], dtype=torch.int32)
    model.positions = torch.tensor([100, 7, 33, 64])
    _, ((keys, values),) = model.truth()
    before = model.caches[0].clone()
    model.step(model.bind())

    found = model.caches[0].flatten(1, 2)
    for row, slot in ((0, 163), (2, 191)):
        assert_close(
            found[:, slot].double().flatten(1),
            torch.stack([keys[row], values[row]]).flatten(1),
            0.02,
        )
    changed = (found != before.flatten(1, 2)).flatten(2).any(-1).any(0).nonzero().flatten()
    assert changed.tolist() == [163, 191]


@pytest.mark.parametrize(
    "model", [Case(4, layers=1), Case(4, layers=1, fp8_weights=True)], indirect=True, ids=str
)
def test_a_sequence_has_the_same_bits_beside_any_others(model):
    bound = model.bind()
    first = model.step(bound).logits[2].clone()
    model.positions[[0, 1, 3]] = torch.tensor([3, 170, 90])
    model.ids[[0, 1, 3]] = 11

    assert torch.equal(model.step(bound).logits[2], first)


@pytest.mark.parametrize("model", [Case(2, layers=1)], indirect=True, ids=str)
def test_negative_ids_read_tokens_sampled_by_the_step_before(model):
    bound = model.bind()
    expected = model.step(bound).logits.clone()
    model.sampled[[5, 1]] = model.ids
    model.ids = torch.tensor([-1 - 5, -1 - 1])

    assert torch.equal(model.step(bound).logits, expected)


CHAINED = (
    Case(8),
    Case(8, fp8=True, early=False),
    Case(4, window=40, heads=6, dim=48, hidden=192, inner=320, num_sms=20),
)
"""Models whose rows are tokens of two sequences."""


@pytest.mark.parametrize("model", slow_except(CHAINED[:1], CHAINED), indirect=True, ids=str)
def test_rows_of_one_sequence_agree_with_steps_of_their_own(model):
    rows = model.case.rows
    counts = (rows - 3, 3)
    firsts = (62, 30)  # the tokens' keys are in two stages
    numbers = torch.tensor([i for count in counts for i in range(count)])
    owner = torch.repeat_interleave(torch.arange(2), torch.tensor(counts))
    table = torch.stack([torch.arange(6), torch.arange(6, 12)]).int()[owner]
    positions = torch.tensor(firsts)[owner] + numbers
    places = table.gather(1, positions[:, None] // BLOCK)[:, 0]
    model.table, model.positions, model.earlier = table, positions, numbers.int()
    model.slots = (places * BLOCK + positions % BLOCK).int()
    before = [it.clone() for it in model.caches]
    found = model.step(model.bind())
    after = [it.clone() for it in model.caches]
    for cache, old in zip(model.caches, before, strict=True):
        cache.copy_(old)
    alone = dataclasses.replace(model.case, rows=1)
    model.case = alone
    bound, ids = model.bind(), model.ids
    for row in range(rows):
        model.ids, model.positions = ids[row : row + 1], positions[row : row + 1]
        model.table, model.slots = (
            table[row : row + 1].contiguous(),
            (places * BLOCK + positions % BLOCK).int()[row : row + 1],
        )
        model.earlier = torch.zeros(1, dtype=torch.int32)
        step = model.step(bound)
        assert_close(found.logits[row : row + 1], step.logits, 0.01)
    for cache, together in zip(model.caches, after, strict=True):
        assert_close(cache.float().flatten(0, 2), together.float().flatten(0, 2), 0.01)

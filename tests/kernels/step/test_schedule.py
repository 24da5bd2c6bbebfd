"""The schedule of the single launch is proved for known models, and for a sample of others."""

import ast
import dataclasses
import inspect
import textwrap
from pathlib import Path

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from benchmarks.shapes import SHAPES
from kernels.step.single_launch import StepShape
from kernels.weight_format import FP8_ROWS, WeightFormat
from model.checkpoint.config import ModelConfig
from model.executors.single_launch import step_shape
from model.executors.support import is_attention_and_dense
from tests.kernels.triton_interpreter import HAS_TRITON
from tests.marks import slow_except

if HAS_TRITON:
    from kernels.step.gpu import consumer_rows
    from tests.kernels.step.schedule.launches import Launch
    from tests.kernels.step.schedule.proof import check
    from tests.kernels.step.schedule.recorder import ARITHMETIC
    from tests.kernels.step.step_on_cpu import MODULES
    from tests.kernels.step.test_schedule_mutations import SMALL, Mutation, mutated

pytestmark = [
    pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host"),
    pytest.mark.timeout(300),
]

FOLDER = Path(__file__).parents[3] / "server" / "cli" / "bench" / "shapes"
INT4 = WeightFormat("int4", 4, 128, "group", False, False, 8, "float16")
FP8_BLOCKS = WeightFormat("fp8-blocks", 8, 128, "block")
LAYERS = 3
"""Layers of most launches: one after the first and before the last."""
SMS = range(78, 149)
CONTEXTS = (0, 31, 100, 700, 1500, 2300)


@dataclasses.dataclass(frozen=True, repr=False)
class Kind:
    """Launches of a model with a number of rows, maybe with other weights or another cache."""

    rows: int = 1
    form: WeightFormat | None = None
    fp8_cache: bool = False
    chained: bool = False

    def __repr__(self):
        parts = [f"{self.rows} rows", self.form and self.form.name, self.fp8_cache and "FP8 cache"]
        return ", ".join(it for it in (*parts, self.chained and "one sequence") if it)

    def positions(self, number):
        """Return the positions of the rows; `number` selects them."""
        if self.chained:
            return tuple(CONTEXTS[number % 6] + row for row in range(self.rows))
        return tuple(CONTEXTS[(number + row) % 6] + row for row in range(self.rows))


KINDS = (
    Kind(), Kind(2), Kind(4), Kind(8), Kind(8, chained=True), Kind(4, fp8_cache=True), Kind(form=FP8_ROWS),
    Kind(2, FP8_ROWS), Kind(8, FP8_ROWS), Kind(form=INT4), Kind(form=FP8_BLOCKS, fp8_cache=True),
)  # fmt: skip


def launch_of(name, kind, number, *, layers=LAYERS, whole_head=False):
    """Return a launch of a model on a GPU of `SMS`; `number` selects SMs, positions and the half to begin with."""
    network = ModelConfig.from_folder(FOLDER / name).network
    shape, mixer = step_shape(network), network.layers[0].mixer
    num_sms = SMS[number * 29 % len(SMS)]
    if not whole_head:
        # As many logits as a program multiplies in two calls, and a few more.
        shape = shape._replace(vocab_size=8 * (5 * num_sms + 17) + shape.vocab_size % 8)
    windows = [layer.mixer.window for layer in network.layers]
    # Gemma's last layers before and after one without a window.
    first = next((i - 1 for i, it in enumerate(windows) if i and it is None), 0)
    return Launch(
        shape, kind.positions(number), tuple(windows[first:] + windows[:first])[:layers],
        tuple(range(kind.rows)) if kind.chained else (), num_sms, kind.form, kind.fp8_cache,
        norms=mixer.qk_norm is not None, bias=mixer.bias, base=number // 2 % 2,
    )  # fmt: skip


MODELS = [
    name
    for name in SHAPES
    if is_attention_and_dense(ModelConfig.from_folder(FOLDER / name).network)
]
CASES = [(name, kind) for name in MODELS for kind in KINDS]
FAST = [("smollm2-135m", KINDS[4]), ("qwen3-0.6b", KINDS[0]), ("gemma-3-1b", KINDS[0])]


@pytest.mark.parametrize("case", slow_except(FAST, CASES))
def test_launches_of_a_known_model_are_proved(case):
    first = CASES.index(case)
    launches = [launch_of(*case, first + i * len(CASES)) for i in range(1 if case in FAST else 2)]
    for launch in launches:
        if not launch.unsupported:
            check(launch.record())


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "layers"), [("smollm2-135m", 30), ("qwen2.5-1.5b", 28), ("gemma-3-1b", 26)]
)
def test_all_layers_and_logits_of_a_model_are_proved(name, layers):
    check(launch_of(name, Kind(), 5, layers=layers, whole_head=True).record())


@pytest.mark.parametrize("layers", [1, 2, 3, 4, 5])
def test_steps_of_any_number_of_layers_begin_with_either_half(layers):
    for base in (0, 1):
        for early in (False, True):
            for name in ("rows", "gemma"):
                windows = (SMALL[name].windows * 2)[:layers]
                launch = dataclasses.replace(
                    SMALL[name], windows=windows, base=base, early=early, num_sms=16
                )
                check(launch.record())


@st.composite
def launches(draw, sms, units):
    """Draw a launch of a model with sizes of up to `units` * 64."""
    kv_heads = draw(st.integers(1, 4))
    heads = kv_heads * draw(st.integers(1, 9))
    shape = StepShape(
        64 * draw(st.integers(1, units)), 64 * draw(st.integers(1, 3 * units)), heads, kv_heads,
        16 * draw(st.integers(2, 16)), draw(st.integers(8, 4000)), 1e-6, 0.1, post_norms=draw(st.booleans()),
    )  # fmt: skip
    rows = draw(st.sampled_from((1, 1, 2, 4, 8)))
    earlier = [0]
    positions = [draw(st.integers(0, 800))]
    for _ in range(rows - 1):
        chained = draw(st.booleans())
        earlier.append(earlier[-1] + 1 if chained else 0)
        positions.append(positions[-1] + 1 if chained else draw(st.integers(0, 800)))
    window = draw(st.sampled_from((None, 1, 40, 300)))
    windows = draw(st.lists(st.sampled_from((None, window)), min_size=1, max_size=4))
    launch = Launch(
        shape, tuple(positions), tuple(windows), tuple(earlier), draw(sms),
        draw(st.sampled_from((None, FP8_ROWS, INT4, FP8_BLOCKS))), draw(st.booleans()), draw(st.booleans()),
        draw(st.booleans()), draw(st.integers(0, 1)), draw(st.sampled_from((None, True, False))),
        draw(st.sampled_from((16, 32))),
    )  # fmt: skip
    assume(not launch.unsupported)
    return launch


@given(launches(st.integers(4, 40), 6))
@settings(max_examples=8, deadline=None, derandomize=True)
def test_launches_of_small_models_on_few_sms_are_proved(launch):
    check(launch.record())


@pytest.mark.slow
@given(launches(st.sampled_from(SMS), 48))
@settings(max_examples=60, deadline=None)
def test_launches_of_other_models_are_proved(launch):
    check(launch.record())


def test_waits_that_only_save_repeated_loads_may_be_left_out():
    old = "wait_grid(counter + HEADS_DONE, given, gl.constexpr(False))"
    without = Mutation("", "row", consumer_rows.consume_rows, old, "given", "")

    check(SMALL["row"].record(mutated(without)))


def test_functions_that_are_not_recorded_take_no_part_in_the_exchange():
    sources = {}
    for module in MODULES:
        for name, it in vars(module).items():
            if hasattr(it, "fn") and it.fn.__module__.startswith("kernels.step.gpu"):
                sources[name] = ast.parse(textwrap.dedent(inspect.getsource(it.fn)))
    pending, seen = list(ARITHMETIC), set()
    while pending:
        name = pending.pop()
        if name in seen or name not in sources:
            continue
        seen.add(name)
        for node in ast.walk(sources[name]):
            called = node.func if isinstance(node, ast.Call) else None
            if isinstance(called, ast.Name):
                pending.append(called.id)
            if isinstance(called, ast.Attribute) and isinstance(called.value, ast.Name):
                assert called.value.id not in ("mbarrier", "async_copy"), name
                assert called.value.id != "gl" or called.attr not in ("store", "atomic_add"), name
                assert called.attr != "inline_asm_elementwise", name
    assert len(seen) > len(ARITHMETIC) / 2
    shared = {"wait_full", "wait_empty", "release", "sent", "publish", "received", "clear"}
    assert not seen & {*shared, "wait_grid", "count_in", "parts_of", "stage"}

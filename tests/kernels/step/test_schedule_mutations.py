"""Mistakes in the single launch, each of which the checker of its schedule finds."""

import dataclasses
import inspect
import re
import textwrap

import pytest

from kernels.step.single_launch import StepShape
from tests.kernels.triton_interpreter import HAS_TRITON

if HAS_TRITON:
    from kernels.step.gpu import (
        attend,
        consumer,
        consumer_rows,
        grid_barrier,
        merge_splits,
        producer,
        products_of_rows,
        ring,
        score_rows,
        step_constants,
        tensor_products,
        vectors,
    )
    from tests.kernels.step.schedule.events import ScheduleError
    from tests.kernels.step.schedule.launches import Launch
    from tests.kernels.step.schedule.proof import check

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")

SHAPE = StepShape(128, 320, 4, 2, 32, 8 * 40 + 5, 1e-6, 32**-0.5)
LAYERS = (None, None, None)
if HAS_TRITON:
    SMALL = {
        "row": Launch(SHAPE, positions=(300,), windows=LAYERS, num_sms=18),
        "short": Launch(SHAPE, positions=(40,), windows=LAYERS, num_sms=18),
        "rows": Launch(
            SHAPE, positions=(300, 301, 70, 5), earlier=(0, 1, 0, 0), windows=LAYERS, num_sms=18
        ),
        "late": Launch(SHAPE, positions=(300,), windows=LAYERS, num_sms=18, early=False),
        "late rows": Launch(SHAPE, positions=(300, 9), windows=LAYERS, num_sms=18, early=False),
        "gemma": Launch(
            SHAPE._replace(post_norms=True), positions=(300,), windows=(64, None, None), num_sms=18
        ),
    }  # fmt: skip


@dataclasses.dataclass(frozen=True)
class Mutation:
    """A mistake.

    Attributes:
        name: what is wrong.
        launch: a launch in which this matters.
        function: of the kernel.
        old: a part of its source, which `new` replaces.
        found: pattern of what the checker finds.
    """

    name: str
    launch: str
    function: object
    old: str
    new: str
    found: str

    def __str__(self):
        return f"{self.name} ({self.launch})"


def mutated(mutation):
    """Return the function of a kernel, in Python, and the one that takes its place."""
    function = mutation.function.fn
    source = inspect.getsource(function)
    assert source.count(mutation.old) == 1, f"{source.count(mutation.old)} of {mutation.old!r}"
    source = textwrap.dedent(source[source.index("def ") :])
    made = {}
    exec(source.replace(mutation.old, mutation.new), function.__globals__, made)  # noqa: S102 - a kernel with one change
    return {function: made[function.__name__]}


MUTATIONS = (
    # Thresholds.
    Mutation("a wait for an arrival less", "row", consumer_rows.consume_rows,
             "wait_grid(counter, arrivals, c.EARLY)", "wait_grid(counter, arrivals - 1, c.EARLY)",
             "does not show which"),
    Mutation("a wait for an arrival more", "row", consumer_rows.consume_rows,
             "wait_grid(counter, arrivals, c.EARLY)", "wait_grid(counter, arrivals + 1, c.EARLY)",
             "deadlock: program . waits for 19 arrivals at counter 0, 18 come"),
    Mutation("a head's wait for an arrival less", "rows", attend.attend,
             "COUNTER_LINE, arrivals, gl", "COUNTER_LINE, arrivals - 1, gl", "does not show which"),
    Mutation("a wait for fewer splits", "row", consumer_rows.consume_rows,
             "wait_grid(counter + HEADS_DONE, given,", "wait_grid(counter + HEADS_DONE, given - 1,",
             "does not show which"),
    Mutation("a wait for more splits", "short", attend.attend,
             "return used, programs * c.UNITS", "return used, c.SPLIT_GROUPS * c.UNITS", "deadlock"),
    Mutation("a wait for more shares of merged splits", "rows", consumer_rows.consume_rows,
             "(layer + 1) * tiles, gl", "(layer + 1) * programs, gl", "deadlock"),
    Mutation("splits of a layer with a window counted as of the others", "gemma", consumer.consume,
             "given = results", "given = (layer + 1) * items",
             "deadlock: program 0 waits for 12 arrivals at counter 32, 10 come"),
    Mutation("an end before all logits are there", "row", consumer_rows.consume_rows,
             "wait_grid(counter, arrivals + programs,", "wait_grid(counter, arrivals,",
             "may load best of layer 3 before it is stored by program 1"),
    # Waits, fences and orders that are left out.
    Mutation("no wait for the heads", "late", attend.attend,
             "wait_grid(counter + HEAD_READY + kv_head * COUNTER_LINE, arrivals, gl.constexpr(False))",
             "arrivals", "may load qkv of layer 0 before it is stored"),
    Mutation("no wait for the splits", "late", consumer_rows.consume_rows,
             "wait_grid(counter + HEADS_DONE, given, gl.constexpr(False))", "given",
             "may load (logs|parts) of layer 0 before it is stored"),
    Mutation("no fence", "row", consumer_rows.consume_rows,
             "wait_grid(counter, arrivals, c.EARLY)", "wait_grid(counter, arrivals, gl.constexpr(False))",
             "may load .* before it is cleared"),
    Mutation("no fence, one sequence", "gemma", consumer.consume,
             "wait_grid(counter, arrivals, c.EARLY)", "wait_grid(counter, arrivals, gl.constexpr(False))",
             "may load .* before it is cleared"),
    Mutation("a fence of another thread", "row", grid_barrier.wait_grid,
             "setp.eq.u32 arriving, thread, 32", "setp.eq.u32 arriving, thread, 64",
             "may load .* before it is cleared"),
    Mutation("a relaxed arrival", "late", grid_barrier.arrive_published,
             '"relaxed" if c.EARLY else "release"', '"relaxed"', "may load qkv of layer 0 before it is stored"),
    Mutation("a relaxed last arrival", "row", grid_barrier.arrive_grid,
             '"release"', '"relaxed"', "may load best of layer 3 before it is stored"),
    Mutation("a relaxed wait", "late", grid_barrier.wait_grid,
             "ld.acquire.gpu", "ld.relaxed.gpu", "may load qkv of layer 0 before it is stored"),
    Mutation("no barrier behind a wait", "late", grid_barrier.wait_grid,
             "    gl.thread_barrier()\n", "", "may load .* of layer 0 before it is stored"),
    Mutation("no barrier before an arrival", "late", grid_barrier.count_in,
             "    gl.thread_barrier()\n", "", "may load .* of layer 0 before it is stored"),
    Mutation("a weak store of what others poll", "row", grid_barrier.publish,
             "store_relaxed(half + place, there, exists)", "gl.store(half + place, there, mask=exists)",
             "is stored weakly, but polled"),
    Mutation("no repeated load", "row", products_of_rows.share_rows,
             "numbers = received(numbers, place, 4, c)", "numbers = loaded[i]",
             "is used in layer 0 before it has been received"),
    Mutation("a load through the first-level cache", "row", consumer_rows.load_residual,
             'gl.load(place, cache_modifier=".cg")', "gl.load(place)", "first-level cache"),
    Mutation("a repeated load of other places", "rows", merge_splits.mix_rows,
             "place = part_places(parts, (parity * c.SPLITS + s) * ALL + block, within, c)",
             "place = part_places(parts, parity * c.SPLITS * ALL + block, within, c)",
             "loaded again from other places"),
    # Halves and clears.
    Mutation("no clear", "row", grid_barrier.publish,
             "if c.EARLY:\n        clear(vector, size, parity, place, exists)", "pass",
             "leaves 256 places of the other half of qkv"),
    Mutation("no clear of splits that are not there", "short", attend.attend,
             "clear(parts, c.SPLITS * c.HEADS * c.D, parity, place, gl.constexpr(True))", "pass",
             "leaves .* places of the other half of parts"),
    Mutation("a clear of a part of a head", "short", attend.attend,
             "gl.minimum(number, c.D - 1)", "gl.minimum(number, c.D - 2)", "leaves 28 places of the other half"),
    Mutation("a clear of the half that is stored", "row", grid_barrier.clear,
             "(1 - parity) * size", "parity * size", "leaves 256 places of the other half of qkv"),
    Mutation("stores to the other half", "row", grid_barrier.publish,
             "+ parity * size", "+ (1 - parity) * size", "qkv is stored in layer 0 but not loaded"),
    Mutation("loads of the other half", "row", consumer_rows.consume_rows,
             "vector = inner + parity *", "vector = inner + (1 - parity) *",
             "inner is stored in layer 0 but not loaded"),
    Mutation("the same half in all layers", "row", consumer_rows.consume_rows,
             "parity = (base + layer) & 1", "parity = base", "may hold numbers of earlier layers or steps"),
    Mutation("layers that begin with the other half", "row", consumer_rows.consume_rows,
             "parity = (base + layer) & 1", "parity = (base + layer + 1) & 1",
             "may hold numbers of earlier layers or steps"),
    Mutation("the vector before", "row", consumer_rows.consume_rows,
             "vector = hidden + parity * (c.BATCH * c.HIDDEN)",
             "vector = between + parity * (c.BATCH * c.HIDDEN)",
             "place . of hidden is stored in layer 0 but not loaded"),
    # The end.
    Mutation("a counter that is not reset", "rows", grid_barrier.reset_counters,
             "gl.store(counter + HEADS_MIXED, 0)", "pass", "counter 64 is not 0"),
    Mutation("counters of some heads are not reset", "row", grid_barrier.reset_counters,
             "gl.static_range(c.KV_HEADS)", "gl.static_range(1)", "counter 128 is not 0"),
    Mutation("the next step begins with the wrong half", "row", grid_barrier.reset_counters,
             "(base + c.LAYERS) & 1", "base", "the next step begins with half 0"),
    Mutation("a reset before the end", "row", consumer_rows.consume_rows,
             "    arrive_grid(counter)\n", "    arrive_grid(counter)\n    reset_counters(counter, base, c)\n",
             "counter 0 is used after its reset"),
    Mutation("a reset without a wait", "rows", consumer_rows.consume_rows,
             "wait_grid(counter, arrivals + programs, gl.constexpr(False))", "pass",
             "may load best of layer 3 before it is stored"),
    # Tiles.
    Mutation("a tile too many", "row", step_constants.projected_tiles,
             "+ members - 1) // members", "+ members) // members", "are published, computed from rows"),
    Mutation("a tile too few", "row", step_constants.projected_tiles,
             "+ members - 1) // members", ") // members", "leaves 128 places of the other half of qkv"),
    Mutation("a tile of two programs", "late", step_constants.first_tile,
             "first = gl.program_id(0)", "first = gl.program_id(0) // 2", "written twice"),
    Mutation("another order of tiles than the producer's", "late rows", consumer_rows.add_residual,
             "tile = first + i * gl.num_programs(0)", "tile = (first + 1) % 16",
             "rows .* of .* are published, computed from rows"),
    Mutation("the weights of the gate twice", "row", producer.produce_step,
             "place += c.INNER * HIDDEN", "pass", "rows .* of gate_up are published"),
    Mutation("a matrix of another layer", "row", producer.produce_step,
             "matrix_of(table, layer, DOWN, dtype, c)", "matrix_of(table, 0, DOWN, dtype, c)",
             "hidden of layer 1 is computed from down of layer 0"),
    Mutation("a part of a row less", "row", producer.send_rows,
             "send_parts(ring, stage, weight, FULL, last, UNITS, gl.constexpr(True), COUNT, FP8)",
             "send_parts(ring, stage, weight, FULL, last, UNITS - 64, gl.constexpr(True), COUNT, FP8)",
             "are multiplied in columns"),
    Mutation("logits that are stored twice", "rows", score_rows.score_tiles,
             "token < c.VOCAB)", "token >= 0)", "has no place"),
    Mutation("partial results of some programs", "row", score_rows.choose_rows,
             "number < gl.num_programs(0)", "number <= gl.num_programs(0)", "is loaded in layer 3 but not stored"),
    # Attention.
    Mutation("keys of the next split", "rows", producer.send_keys,
             "split_group * c.LOCAL, c)\n", "split_group * c.LOCAL + 1, c)\n",
             "row 0 attends keys"),
    Mutation("keys of another head", "row", producer.send_keys,
             "(line * c.KV_HEADS + kv_head) * c.D", "(line * c.KV_HEADS + kv_head // 2) * c.D",
             "attend keys of others"),
    Mutation("a split that is left out", "row", step_constants.key_range,
             "gl.minimum((split + 1) * each, stages)", "gl.minimum((split + 1) * each, stages - 1)",
             "attends stages"),
    Mutation("keys of the step that are not added", "rows", attend.attend_stages,
             "if (number + COUNT) * c.KEYS > position - earlier:", "if False:", "attends keys"),
    Mutation("a key of the step too few", "rows", attend.add_step_keys,
             "range(low, high + 1)", "range(low, high)", "attends keys"),
    Mutation("a key that every program writes", "row", attend.attend,
             "if split_group == 0 and part == 0:", "if part == 0:", "keys of layer 0 are stored at places"),
    # One sequence that is not computed as one of several.
    Mutation("an input of one sequence that is not received", "gemma", vectors.share,
             "numbers = received(numbers, vector + i * WIDTH + element, 4, c)", "pass",
             "is used in layer 0 before it has been received"),
    Mutation("an output of one sequence that is not received", "gemma", vectors.receive_hidden,
             "received(loaded[i], vector + i * WIDTH + element, 4, c)", "loaded[i]",
             "between is used in layer 0 before it has been received"),
    Mutation("a wait of one sequence for an arrival less", "gemma", consumer.consume,
             "wait_grid(counter, arrivals, c.EARLY)", "wait_grid(counter, arrivals - 1, c.EARLY)",
             "does not show which"),
    Mutation("a tile of one sequence that is multiplied twice", "gemma", consumer.add_rows,
             "tile = first + i * gl.num_programs(0)", "tile = first // 2",
             "are published, computed from rows"),
    Mutation("splits of one sequence that are not merged", "gemma", merge_splits.combine,
             "exists = gl.expand_dims((number < ALL) & (s < splits), 1)",
             "exists = gl.expand_dims((number < ALL) & (s < 1), 1)", "of parts is stored in layer . but not loaded"),
    Mutation("stages of one sequence that are released twice", "gemma", tensor_products.sums_of_warps,
             "    release(ring, used, COUNT, c)\n",
             "    release(ring, used, COUNT, c)\n    release(ring, used, COUNT, c)\n", "is released twice"),
    # The ring.
    Mutation("another phase", "row", ring.wait_empty,
             "& 1) ^ 1", "& 1)", "waits for another phase"),
    Mutation("a stage that is not released", "row", ring.release,
             "gl.static_range(COUNT)", "gl.static_range(COUNT - 1)", "another phase of stage"),
    Mutation("a release without a barrier", "row", ring.release,
             "    gl.thread_barrier()\n", "", "without a barrier behind its last load"),
    Mutation("loads behind the release", "late", attend.attend_stages,
             "    all_scores = ()\n", "    release(ring, used, COUNT, c)\n    all_scores = ()\n",
             "is loaded while it is not full"),
    Mutation("no wait for a stage", "row", products_of_rows.multiply,
             "wait_full(ring, used + i, c)", "pass", "is loaded while it is not full"),
    Mutation("a wait for a stage that the ring does not hold", "row", products_of_rows.multiply,
             "gl.static_range(TILES * EACH)", "gl.static_range(TILES * EACH + c.STAGES)", "another phase"),
    Mutation("copies that arrive at another stage", "row", ring.sent,
             "ring.full.index(stage)", "ring.full.index(0)", "stage 0 is full twice"),
)  # fmt: skip


@pytest.mark.parametrize("mutation", MUTATIONS, ids=str)
def test_a_mistake_is_found(mutation):
    with pytest.raises(ScheduleError) as found:
        check(SMALL[mutation.launch].record(mutated(mutation)))

    assert re.search(mutation.found, str(found.value))


@pytest.mark.parametrize("name", SMALL if HAS_TRITON else ())
def test_a_launch_without_mistakes_is_proved(name):
    check(SMALL[name].record())

"""One launch from projection to attention on a GPU: right, repeatable, and the same in graphs and launched early."""

import pytest
import torch

import kernels
from kernels.fused.linear import LinearArguments, linear
from kernels.linear_plan import LinearChoice, LinearKernel, LinearProblem, vector_default
from kernels.token_plan import TokenLaunch
from tests.kernels.token_cases import TokenCase

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

DEVICE = "cuda"
REPEATS = 50
LAUNCHES = [TokenLaunch(1, 16, 1), TokenLaunch(2, 32, 2), TokenLaunch(4, 16, 4)]
HEADS = [(16, 8, 128), (32, 8, 64), (32, 8, 128), (12, 4, 80), (2, 2, 256)]
CASES = [
    *((torch.bfloat16, launch, heads) for launch in LAUNCHES for heads in HEADS[:3]),
    *((torch.bfloat16, LAUNCHES[1], heads) for heads in HEADS[3:]),
    *((dtype, LAUNCHES[1], HEADS[0]) for dtype in (torch.float16, torch.float32)),
]
ROWS = [(1,), (184,), (1024,), (5000,), (130, 17, 0, 1029), (64, 1, 333, 16, 0, 7, 900, 65)]


def can_depend():
    return kernels.detect(DEVICE).sm >= 90


def case(lengths, heads, dtype=torch.bfloat16, **changes):
    return TokenCase(lengths, *heads, dtype, device=DEVICE, **changes)


@pytest.mark.parametrize(("dtype", "launch", "heads"), CASES, ids=str)
def test_it_is_as_exact_as_two_launches_and_writes_the_same_cache(dtype, launch, heads):
    for lengths in ROWS:
        case(lengths, heads, dtype).check(launch, pdl=can_depend())


@pytest.mark.parametrize("launch", [TokenLaunch(2, 8, 2)], ids=str)
@pytest.mark.parametrize(
    "changes",
    [{"sliding_window": 1}, {"sliding_window": 200}, {"softcap": 5.0}, {"norms": False}],
    ids=str,
)
def test_windows_caps_and_heads_without_norms_are_right(launch, changes):
    for lengths in ROWS:
        case(lengths, HEADS[0], **changes).check(launch, pdl=can_depend())


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_it_repeats_to_the_bit_and_leaves_its_counters_as_they_were(launch):
    it = case((900, 184, 0, 33), HEADS[0])
    room = it.room(launch)
    ahead = tuple(torch.empty(8 << 20, dtype=torch.int8, device=DEVICE) for _ in range(2))
    first = it.run(launch, room)

    for number in range(REPEATS):
        again = it.run(launch, room, pdl=can_depend(), ahead=ahead if number % 2 else None)

        assert torch.equal(again, first)
    assert not room.arrivals.any()


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
def test_a_captured_launch_follows_lengths_on_the_device(launch):
    longest, shortest = ((1000, 77, 300), (3, 76, 200))
    it, other = case(longest, HEADS[0]), case(shortest, HEADS[0])
    room = it.room(launch)
    it.run(launch, room)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = it.run(launch, room)
    columns = other.batch.block_table.shape[1]
    inputs = (
        (it.batch.seq_lens, other.batch.seq_lens),
        (it.batch.block_table[:, :columns], other.batch.block_table),
        (it.positions, other.positions),
        (it.slots, other.slots),
        (it.qkv, other.qkv),
        (it.kv[:, : other.kv.shape[1]], other.kv),
        (it.rope[0][: len(other.rope[0])], other.rope[0]),
        (it.rope[1][: len(other.rope[1])], other.rope[1]),
        (it.norms[0], other.norms[0]),
        (it.norms[1], other.norms[1]),
    )
    for target, source in inputs:
        target.copy_(source)

    graph.replay()

    torch.cuda.synchronize()
    alone = other.check(launch)
    torch.testing.assert_close(out, alone, rtol=2e-2, atol=1e-2)
    first = out.clone()
    for _ in range(REPEATS):
        graph.replay()
        torch.cuda.synchronize()
        assert torch.equal(out, first)


@pytest.mark.parametrize("launch", LAUNCHES, ids=str)
@pytest.mark.parametrize("captured", [False, True], ids=["eager", "graph"])
def test_what_it_attends_with_is_what_the_kernel_before_it_projects(launch, captured):
    """In a chain of early launches that hands a changing projection on, no bit differs from one without."""
    if not can_depend():
        pytest.skip("dependent launches need compute capability 9.0")
    it = case((184,), HEADS[0])
    rows, outputs = it.qkv.shape
    problem = LinearProblem(rows, outputs, 2048)
    choice = LinearChoice(
        problem, LinearKernel.VECTOR, vector_default(problem, kernels.detect(DEVICE)), "test"
    )
    generator = torch.Generator(DEVICE).manual_seed(3)
    weights = [
        (torch.randn(outputs, 2048, generator=generator, device=DEVICE) / 45).bfloat16()
        for _ in range(4)
    ]
    start = torch.randn(rows, 2048, generator=generator, device=DEVICE).bfloat16()
    projected = torch.empty(rows, outputs, dtype=torch.bfloat16, device=DEVICE)
    room = it.room(launch)

    def chain(pdl):
        x = start + 0
        for weight in weights:
            linear(x, weight, choice, projected, LinearArguments(pdl=pdl))
            it.qkv = projected
            x = it.run(launch, room, pdl=pdl).flatten(1)
        return x

    expected = chain(pdl=False).clone()
    run = lambda: chain(pdl=True)  # noqa: E731
    if captured:
        chain(pdl=True)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph):
            out = chain(pdl=True)
        run = lambda: (graph.replay(), out)[1]  # noqa: E731

    for _ in range(REPEATS):
        assert torch.equal(run(), expected)

"""NaN, a lack of memory, errors and a step that never ends, on a GPU, with recorded steps and one step ahead."""

import asyncio
import gc
import time

import pytest
import torch

from benchmarks.local_engine import LocalEngine
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import NOT_FINITE, SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import FinishReason, GenerateRequest
from server.engine.core.results.step_retry import OUT_OF_MEMORY, STEP_FAILED
from server.engine.link.front_end.client import EngineClient
from server.engine.link.protocol import EngineState
from tests.faults.engine import COMMAND, ONCE_VARIABLE, VARIABLE, inject
from tests.faults.runner import poison

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(120)]

CONFIG = {
    "model_path": str(resolve(BUNDLED)),
    "model_id": BUNDLED,
    "device": "cuda",
    "dtype": "float32",
    "kv_cache_tokens": 16384,
    "max_num_seqs": 16,
    "max_num_batched_tokens": 1024,
}
CACHES = ["auto", "fp8"]


@pytest.fixture(scope="module", params=CACHES)
def engine(request):
    if request.param == "fp8" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("the kernels of this device do not read a float8 cache")
    made = LocalEngine(EngineConfig(**(CONFIG | {"kv_cache_dtype": request.param})))
    while made.engine._runner.use_idle_time():
        pass
    yield made
    del made
    gc.collect()
    torch.cuda.empty_cache()


@pytest.fixture
def faulty(engine):
    """Return a function that injects faults for the rest of the test."""
    runner = engine.engine._runner

    def make(*faults):
        inject(engine.engine, *faults)
        return engine

    yield make
    engine.engine._runner = runner


def requests(count, num_tokens=24, **sampling):
    parameters = SamplingParams(**{"max_new_tokens": num_tokens, "temperature": 0.0} | sampling)
    return [
        GenerateRequest(
            request_id=i,
            prompt_token_ids=[(7 * i + j) % 500 + 5 for j in range(3 + 13 * i)],
            sampling=parameters,
        )
        for i in range(count)
    ]


def tokens(answers):
    return [[event.token_id for event in events] for events in answers]


def assert_all_free(engine):
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    engine.engine._scheduler.check_invariants()


SAMPLINGS = [
    {},
    {"temperature": 1.1, "seed": 5},
    {"temperature": 1.1, "seed": 5, "top_p": 0.8, "repetition_penalty": 1.2},
]


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
@pytest.mark.parametrize("count", [1, 8])
def test_nan_ends_its_own_sequence(engine, faulty, sampling, count):
    asked = requests(count, **sampling)
    expected = tokens(engine.generate(asked))
    row = count // 2

    found = faulty(f"nan@step=6:row={row}").generate(asked)

    (failed,) = [i for i, e in enumerate(found) if e[-1].finish_reason is FinishReason.ERROR]
    assert found[failed][-1].error == NOT_FINITE
    length = len(found[failed]) - 1
    assert tokens(found)[failed][:-1] == expected[failed][:length]
    for i in range(count):
        if i != failed:
            assert tokens(found)[i] == expected[i]
    assert_all_free(engine)
    faulty()  # without faults
    assert tokens(engine.generate(asked)) == expected


@pytest.mark.parametrize("sampling", SAMPLINGS, ids=["greedy", "sampled", "filtered"])
def test_nan_in_free_blocks_reaches_no_sequence(engine, sampling):
    asked = requests(13, **sampling)
    expected = engine.generate(asked)
    blocks = engine.engine._scheduler.block_manager
    while blocks._idle:  # cached blocks keep their content
        blocks._evict(next(iter(blocks._idle)))
    for block in range(blocks.num_blocks):
        poison(engine.engine._runner.kv_cache, block)

    assert engine.generate(asked) == expected
    assert_all_free(engine)


@pytest.mark.parametrize(("fault", "error"), [("oom", OUT_OF_MEMORY), ("raise", STEP_FAILED)])
def test_a_sequence_that_makes_steps_fail_ends_alone(engine, faulty, fault, error):
    asked = requests(12)
    expected = tokens(engine.generate(asked))

    found = faulty(f"{fault}@step=5:row=7").generate(asked)

    (failed,) = [i for i, e in enumerate(found) if e[-1].finish_reason is FinishReason.ERROR]
    assert found[failed][-1].error == error
    for i in range(12):
        if i != failed:
            assert tokens(found)[i] == expected[i]
    assert_all_free(engine)


def test_steps_that_run_out_of_memory_once_end_no_sequence(engine, faulty):
    asked = requests(12)
    expected = tokens(engine.generate(asked))

    found = faulty("oom@step=2:every=5").generate(asked)

    assert tokens(found) == expected
    assert_all_free(engine)


@pytest.mark.gpu_memory(None)
@pytest.mark.parametrize("fault", ["hang", "fatal"])
def test_a_device_that_hangs_or_breaks_costs_one_request_and_a_restart(
    monkeypatch, tmp_path, fault
):
    monkeypatch.setenv(VARIABLE, f"{fault}@step=4")
    monkeypatch.setenv(ONCE_VARIABLE, str(tmp_path / "once"))
    request = requests(1)[0]

    async def scenario():
        client = EngineClient(EngineConfig(**CONFIG), 20.0, COMMAND)
        await client.start()
        try:
            await client.wait_until_ready()
            events = [event async for batch in client.submit(request) for event in batch]
            assert events[-1].finish_reason is FinishReason.ERROR
            deadline = time.monotonic() + 60
            while client.state is not EngineState.READY or not client.restarts:
                assert time.monotonic() < deadline
                await asyncio.sleep(0.05)
            events = [event async for batch in client.submit(request) for event in batch]
            assert len(events) == 24
        finally:
            await client.stop()

    asyncio.run(scenario())

"""The model runner: single-launch steps, warm-up, and recovery from failed steps."""

import contextlib

import pytest
import torch

from kernels.gpu.compile_ahead import NotCompiledError
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.executors.single_launch import launch_refusal
from server.engine.core.limits import SchedulerConfig
from server.engine.runner.start.dummy_steps import crowds, first_steps, largest_steps
from server.engine.runner.start.warm_up import compute_largest_step, warm_up
from server.engine.runner.step.model_runner import ModelRunner
from tests.engine.runner.single_launches import replace_single_launch
from tests.engine.runner.test_engine_model import greedy, make_engine
from tests.model.executors.paged import new_cache
from tests.tiny_checkpoint import VOCAB_SIZE, write_tiny_checkpoint

LIMITS = SchedulerConfig(max_num_seqs=4, max_num_batched_tokens=32, max_model_len=256)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    return write_tiny_checkpoint(tmp_path_factory.mktemp("tiny"))


@pytest.fixture
def model(checkpoint):
    return load_model(checkpoint, ModelConfig.from_folder(checkpoint), torch.float32, "cpu")


def make_runner(model, num_blocks=1):
    return ModelRunner(model, new_cache(model, num_blocks, 8, torch.float32))


# Single-launch steps


# A budget of 1 makes each of four prompt tokens a decode row, one of 3 the last one, and six tokens are generated.
@pytest.mark.parametrize(("budget", "plain"), [(1, 9), (3, 6), (64, 5)])
@pytest.mark.parametrize("scored", [False, True], ids=["plain", "scored"])
def test_only_steps_of_a_token_that_is_not_scored_are_single_launches(
    checkpoint, budget, plain, scored, monkeypatch
):
    requests = [greedy(0, [5, 6, 7, 8], 6, prompt_logprobs=scored)]
    changes = {"max_num_seqs": 1, "max_num_batched_tokens": budget}
    expected = make_engine(checkpoint, **changes).generate(requests)
    launches = []

    def launch(kernel, *given):
        launches.append(kernel)
        kernel(*given)

    replace_single_launch(monkeypatch, launch)
    engine = make_engine(checkpoint, **changes)
    launches.clear()

    assert engine.generate(requests) == expected
    assert len(launches) == (5 if scored else plain)


@pytest.mark.parametrize("count", [1, 2, 3, 4])
def test_a_step_of_few_sequences_is_a_single_launch_of_as_many_rows_or_the_next_power_of_two(
    checkpoint, count, monkeypatch
):
    requests = [greedy(i, [5 + i, 6, 7, 8], 6) for i in range(count)]
    expected = make_engine(checkpoint).generate(requests)
    launches = []

    def launch(kernel, ids, *given):
        assert kernel.rows == len(ids)
        launches.append(len(ids))
        kernel(ids, *given)

    replace_single_launch(monkeypatch, launch, (1, 2, 4))
    engine = make_engine(checkpoint)
    launches.clear()

    assert engine.generate(requests) == expected
    assert set(launches) == ({count} if count != 3 else {4})


@pytest.mark.parametrize(
    "text", ["too many blocks in cooperative launch", "operation not supported"]
)
def test_a_single_launch_that_the_driver_refuses_is_replaced_and_the_plan_says_why(
    checkpoint, text, monkeypatch, caplog
):
    requests = [greedy(0, [5, 6, 7, 8], 6)]
    expected = make_engine(checkpoint, max_num_seqs=1).generate(requests)
    launches, ready = [], []

    def refuse(kernel, *given):
        if not ready:
            return kernel(*given)
        launches.append(1)
        raise RuntimeError(f"Triton Error [CUDA]: {text}")

    replace_single_launch(monkeypatch, refuse)
    engine = make_engine(checkpoint, max_num_seqs=1)
    ready.append(True)

    assert engine.generate(requests) == expected
    assert len(launches) == 1
    reason = f"the driver refuses the launch ({text})"
    assert reason in engine.engine._runner.describe_plan().one_sequence
    assert reason in caplog.text


def test_another_error_of_a_single_launch_is_not_taken_for_a_refusal():
    assert launch_refusal(RuntimeError("Triton Error [CUDA]: an illegal memory access")) is None


# Before the first request


def test_every_dummy_step_works_with_a_cache_of_one_block(model):
    model.reserve_positions(LIMITS.max_model_len)
    runner = make_runner(model)
    outputs = [
        *first_steps(256, LIMITS, 8),
        *crowds(200, LIMITS, 8),
        *largest_steps(256, LIMITS, VOCAB_SIZE, 8),
    ]

    for output in outputs:
        result = runner.execute(output)
        runner.forget(-1)
        rows = result.sampled.by_row(s.num_logits for s in output.decode)
        assert all(token.error is None for tokens in rows for token in tokens)
        assert len(rows) == len(output.decode) + len(output.prefill)


def test_the_largest_step_leaves_no_state_in_the_runner(model):
    model.reserve_positions(LIMITS.max_model_len)
    runner = make_runner(model)

    compute_largest_step(runner, LIMITS)

    assert runner._histories == {}


class FakeWarmUp:
    """A runner with the warm-up of a GPU whose steps only record their kind; `cached`: kernels are compiled."""

    def __init__(self, monkeypatch, model, cached):
        self.seen = []
        self.runner = make_runner(model)
        self.runner.device = torch.device("cuda")
        self.cached, self.compiling = cached, False
        module = "server.engine.runner.start.warm_up."
        monkeypatch.setattr(module + "compile_ahead", self.compile_ahead)
        monkeypatch.setattr(module + "_compute_first_steps", self.compute)
        monkeypatch.setattr(
            module + "compute_largest_step", lambda *_: self.seen.append("largest step")
        )

    @contextlib.contextmanager
    def compile_ahead(self, _num_threads, _report):
        self.compiling = True
        yield
        self.cached, self.compiling = True, False

    def compute(self, _runner, _limits, _say):
        self.seen.append("compiled" if self.compiling else "computed")
        if not (self.compiling or self.cached):
            raise NotCompiledError


def test_the_warm_up_compiles_nothing_if_all_kernels_are_cached(monkeypatch, model):
    start = FakeWarmUp(monkeypatch, model, cached=True)

    warm_up(start.runner, LIMITS, lambda _: None)

    assert start.seen == ["computed", "largest step"]


def test_the_warm_up_compiles_all_kernels_in_parallel_if_one_is_missing(monkeypatch, model):
    start, messages = FakeWarmUp(monkeypatch, model, cached=False), []

    warm_up(start.runner, LIMITS, messages.append)

    assert start.seen == ["computed", "compiled", "computed", "largest step"]
    assert messages == ["compiling kernels"]


def test_an_interrupted_dummy_step_leaves_no_state(monkeypatch, model):
    model.reserve_positions(LIMITS.max_model_len)
    runner = make_runner(model)

    def interrupted(*_arguments):
        raise NotCompiledError

    monkeypatch.setattr(runner._sampler, "begin", interrupted)
    with pytest.raises(NotCompiledError):
        warm_up(runner, LIMITS, lambda _: None)

    assert runner._histories == {}


def test_reserved_positions_are_not_allocated_again_for_a_larger_cache(model):
    model.reserve_positions(64)
    table = model.ropes[0]._cos
    runner = make_runner(model, num_blocks=64)

    for output in first_steps(60, LIMITS, 8):
        runner.execute(output)

    assert model.ropes[0]._cos is table


# After a failed step


def test_the_engine_continues_after_a_failed_step_on_a_cpu(model):
    assert make_runner(model).recover(RuntimeError("a shape is wrong")) is True


@pytest.mark.parametrize(
    "error",
    [
        RuntimeError("Triton Error [CUDA]: an illegal memory access was encountered"),
        torch.AcceleratorError("CUDA error: invalid configuration argument"),
        torch.OutOfMemoryError("CUDA out of memory."),
    ],
    ids=["triton", "pytorch", "memory"],
)
def test_recovery_checks_that_the_cuda_context_still_works(monkeypatch, model, error):
    runner = make_runner(model)
    runner.device = torch.device("cuda")
    monkeypatch.setattr(
        "server.engine.runner.step.model_runner.release_cached", lambda _device: None
    )

    def broken(_device):
        raise torch.AcceleratorError("CUDA error: an illegal memory access was encountered")

    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    assert runner.recover(error) is True
    monkeypatch.setattr(torch.cuda, "synchronize", broken)
    assert runner.recover(error) is False
    monkeypatch.setattr(torch.cuda, "synchronize", lambda _device: None)
    monkeypatch.setattr("server.engine.runner.step.model_runner.release_cached", broken)
    assert runner.recover(error) is not isinstance(error, torch.OutOfMemoryError)


def test_recovery_from_out_of_memory_releases_the_tensors_of_the_step(monkeypatch, model):
    released, held = [], []

    class Large:
        def __del__(self):
            released.append("freed")

    def step():
        large = Large()
        held.append(id(large))
        raise torch.OutOfMemoryError("CUDA out of memory.")

    monkeypatch.setattr(
        "server.engine.runner.step.model_runner.release_cached",
        lambda _device: released.append("released"),
    )
    try:
        step()
    except torch.OutOfMemoryError as error:
        make_runner(model).recover(error)

    assert released == ["freed", "released"]

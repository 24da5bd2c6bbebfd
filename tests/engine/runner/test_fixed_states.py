"""An engine whose layers keep a state of fixed size gives the tokens that each sequence has alone, without a cache."""

import contextlib
import itertools
import json
import math
import random

import pytest
import torch

from kernels import detect
from kernels.arch import CATALOGUE
from kernels.weight_format import unquantized
from model.checkpoint.config import ModelConfig
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from model.executors import cpu_library, single_launch
from model.executors.columns import Bucket
from model.executors.executor import ModelProblem
from model.executors.layers import executor, tables
from server.cli.main import main
from server.engine.core.messages import AbortRequests
from server.engine.core.request import FinishReason
from server.engine.core.start_checks import StartupError
from server.engine.runner.step.model_runner import ModelRunner
from tests.engine import toy_mixer
from tests.engine.runner.step.test_recordings import Again
from tests.engine.runner.test_engine_model import (
    assert_all_free,
    greedy,
    make_engine,
    random_prompt,
    tokens,
)

BLOCK = 8


@pytest.fixture(autouse=True)
def _toys(monkeypatch):
    toy_mixer.register(monkeypatch)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return toy_mixer.write_config(tmp_path_factory.mktemp("toy"))


@pytest.fixture(scope="module")
def known():
    return {}


@pytest.fixture
def alone(folder, known):
    config = ModelConfig.from_folder(folder)
    model = load_model(folder, config, torch.float32, "cpu", "dummy", pack=False)
    reference = toy_mixer.Reference(model)
    reference.known = known
    return reference


@pytest.fixture
def start(folder):
    def start(**changes):
        return make_engine(folder, load_format="dummy", max_num_seqs=8, **changes)

    return start


def run_ahead(engine):
    """Let an engine run a step ahead, with recordings of every step."""
    engine.engine._runs_ahead = True
    runner = engine.engine._runner
    runner.record_steps(engine.engine._scheduler.config, Again())
    while runner.use_idle_time():
        pass
    return engine


def requests_of(rng, count, most_new_tokens=24):
    """Return requests; most prompts begin like others."""
    texts = [random_prompt(rng, 40, 40) for _ in range(2)]
    return [
        greedy(
            i,
            rng.choice(texts)[: rng.randint(0, 40)] + random_prompt(rng, 1, 12),
            rng.randint(1, most_new_tokens),
        )
        for i in range(count)
    ]


def check(alone, requests, answers):
    for request, events in zip(requests, answers, strict=True):
        expected = alone(request.prompt_token_ids, request.sampling.max_new_tokens)
        assert tokens(events) == expected, f"request {request.request_id}"


def hits(engine):
    return engine.engine.stats().prefix_cache_hit_tokens


def test_every_token_depends_on_the_first_one_and_on_the_order(alone):
    prompt = random_prompt(random.Random(0), 30, 30)
    other = [*prompt[::-1]]

    assert len({tuple(alone(it, 8)) for it in (prompt, other, [*prompt[1:]])}) == 3


def test_a_whole_prompt_and_its_tokens(alone, start):
    engine = start(enable_prefix_caching=False)
    request = greedy(1, random_prompt(random.Random(1), 60, 60), 40)

    check(alone, [request], engine.generate([request]))
    assert_all_free(engine)


@pytest.mark.parametrize("caching", [False, True], ids=["no prefixes", "prefixes"])
@pytest.mark.parametrize("chunk", [1, 2, 3, 7, 8, 9, 17])
def test_a_prompt_in_chunks(alone, folder, chunk, caching):
    engine = make_engine(
        folder,
        load_format="dummy",
        max_num_batched_tokens=chunk,
        max_num_seqs=1,
        enable_prefix_caching=caching,
    )
    request = greedy(1, random_prompt(random.Random(1), 60, 60), 20)

    check(alone, [request], engine.generate([request]))
    assert_all_free(engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("budget", [8, 40, 200])
def test_many_sequences_at_the_same_time(alone, start, budget, ahead):
    engine = start(max_num_batched_tokens=budget)
    if ahead:
        run_ahead(engine)
    rng = random.Random(2)

    for _ in range(2):
        requests = requests_of(rng, 20)
        check(alone, requests, engine.generate(requests))
        assert_all_free(engine)
    assert hits(engine) > 0


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("caching", [False, True], ids=["no prefixes", "prefixes"])
def test_preempted_sequences(alone, start, caching, ahead):
    engine = start(kv_cache_tokens=160, max_model_len=128, enable_prefix_caching=caching)
    if ahead:
        run_ahead(engine)
    requests = requests_of(random.Random(3), 10, 60)

    answers = engine.generate(requests)

    assert engine.engine.stats().num_preemptions > 0
    check(alone, requests, answers)
    assert_all_free(engine)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("num_steps", [1, 2, 5])
def test_cancelled_sequences_leave_the_others_undisturbed(alone, start, num_steps, ahead):
    engine = start(max_num_batched_tokens=24)
    if ahead:
        run_ahead(engine)
    requests = requests_of(random.Random(4), 12, 30)
    engine.channel.inbox += requests
    engine.engine.receive(wait=math.inf)
    for _ in range(num_steps):
        engine.engine.step()

    engine.channel.inbox.append(AbortRequests([0, 3, 4]))
    engine.engine.receive(wait=math.inf)
    slots = engine.engine._scheduler.block_manager.slots
    running = engine.engine._scheduler._live.running
    slots.check_invariants(
        [it.slots for it in running], engine.engine._scheduler.block_manager._link_of.values()
    )
    while engine.engine.has_work:
        engine.engine.step()

    found = {request.request_id: [] for request in requests}
    for it in engine.channel.steps:
        for i, request_id in enumerate(it.request_ids):
            found[request_id].append(it.event(i).token_id)
    for request in requests:
        expected = alone(request.prompt_token_ids, request.sampling.max_new_tokens)
        text = found[request.request_id]
        cancelled = request.request_id in (0, 3, 4)
        assert text == (expected[: len(text)] if cancelled else expected)
    assert_all_free(engine)
    assert slots.idle_violations() == []


def test_an_equal_prompt_begins_at_its_last_full_block(alone, start):
    engine = start()
    request = greedy(1, random_prompt(random.Random(5), 45, 45), 20)

    for count in (0, 40, 80):
        check(alone, [request], engine.generate([request]))
        assert hits(engine) == count


def test_a_conversation_begins_at_the_end_of_the_prompt_before(alone, start):
    engine, rng = start(), random.Random(6)
    prompt, expected = random_prompt(rng, 30, 30), 0
    for turn in range(4):
        request = greedy(turn, prompt, 12)
        check(alone, [request], engine.generate([request]))
        assert hits(engine) == expected
        expected += (len(prompt) - 1) // BLOCK * BLOCK
        prompt = [*prompt, *alone(prompt, 12), *random_prompt(rng, 5, 5)]


def test_a_common_beginning_is_found_once_two_prompts_have_parted_after_it(alone, start):
    engine, rng = start(), random.Random(7)
    common = random_prompt(rng, 32, 32)
    found = []
    for i in range(4):
        request = greedy(i, common + random_prompt(rng, 10, 10), 10)
        check(alone, [request], engine.generate([request]))
        found.append(hits(engine))

    assert found == [0, 0, 32, 64]


def test_snapshots_leave_as_others_come(alone, folder):
    engine = make_engine(folder, load_format="dummy", max_num_seqs=2, state_snapshots=2)
    rng = random.Random(8)
    requests = [greedy(i, random_prompt(rng, 20, 30), 5) for i in range(6)]
    for request in (*requests, *requests[-2:], requests[0]):
        check(alone, [request], engine.generate([request]))
    slots = engine.engine._scheduler.block_manager.slots

    assert slots.num_slots == 4
    assert hits(engine) == sum((len(it.prompt_token_ids) - 1) // 8 * 8 for it in requests[-2:])
    assert_all_free(engine)


def failing(monkeypatch, steps):
    """Let the launches of these numbers fail after they have replaced states."""
    launch, count = ModelRunner.launch, itertools.count()

    def fail(runner, output):
        pending = launch(runner, output)
        if next(count) in steps:
            raise RuntimeError("after the states were written")
        return pending

    monkeypatch.setattr(ModelRunner, "launch", fail)


@pytest.mark.parametrize("ahead", [False, True], ids=["step by step", "ahead"])
@pytest.mark.parametrize("steps", [{0}, {3}, {2, 3}, {5, 12, 20}])
def test_sequences_of_a_failed_step_begin_again_at_snapshots(
    alone, start, monkeypatch, steps, ahead
):
    engine = start()
    if ahead:
        run_ahead(engine)
    requests = requests_of(random.Random(9), 6, 20)
    failing(monkeypatch, steps)

    answers = engine.generate(requests)

    check(alone, requests, answers)
    assert engine.engine.stats().num_failed_steps == len(steps)
    assert_all_free(engine)


def test_a_sequence_whose_steps_fail_ends_with_an_error(alone, start, monkeypatch):
    engine = start()
    request = greedy(1, random_prompt(random.Random(9), 20, 20), 10)
    with monkeypatch.context() as patch:
        failing(patch, range(100))
        [events] = engine.generate([request])
    assert [event.finish_reason for event in events] == [FinishReason.ERROR]
    assert_all_free(engine)

    check(alone, [request], engine.generate([request]))


def test_the_cache_has_slots_for_all_sequences_and_their_snapshots(start):
    engine = start()
    runner, memory = engine.engine._runner, engine.engine.info.plan.memory
    cache = runner.kv_cache
    state = 2 * 2 * 256  # two layers with two arrays of 48 float32 each, aligned to 128 bytes

    assert cache.spec.slot_bytes == memory.state_bytes_per_sequence == state
    assert cache.num_slots == 8 + memory.state_snapshots == 8 + 4 * 8
    assert [len(arrays) for arrays in cache.fixed] == [2, 0, 2]
    assert cache.num_bytes == 4096 * cache.spec.token_bytes + 40 * state
    assert start(enable_prefix_caching=False).engine._runner.kv_cache.num_slots == 8
    assert start(state_snapshots=3).engine._runner.kv_cache.num_slots == 11


@pytest.mark.parametrize(
    ("changes", "reason"), [({"enable_prefix_caching": False}, "prefixes are not cached")]
)
def test_a_number_of_snapshots_without_effect_is_named(start, caplog, changes, reason):
    start(state_snapshots=3, **changes)

    assert f"--state-snapshots 3 has no effect: {reason}" in caplog.text


def test_a_state_that_does_not_fit_is_counted(start, monkeypatch):
    monkeypatch.setattr(
        "server.engine.runner.start.kv_memory.free_bytes", lambda _: 4096 * 256 + 8 * 1024 - 1
    )

    with pytest.raises(StartupError, match=r"less 0\.00 GiB for the states of sequences"):
        start()


@pytest.fixture
def tessera(capsys):
    def run(*arguments):
        with contextlib.suppress(SystemExit):
            main(list(arguments))
        captured = capsys.readouterr()
        return captured.out + captured.err

    return run


def test_plans_and_sizes_count_the_states_and_name_the_part_that_executors_do_not_read(
    folder, tessera
):
    where = ("--model", str(folder), "--max-num-seqs=8")

    size = ("size", "--gpu=h100", "--input-len=90", "--output-len=10", *where)
    memory = json.loads(tessera(*size, "--json"))["memory"]
    assert (memory["state_bytes"], memory["state_snapshots"]) == (47 * 1024, 32)
    plan = json.loads(tessera("plan", "--arch=h100", "--json", *where))
    assert plan["memory"]["state_bytes_per_sequence"] == 1024
    assert {step["executor"] for step in plan["steps"]} == {"layers"}
    refused = {row["kernel"]: row["reasons"] for row in plan["steps"][0]["refused"]}
    assert "no Toy" in refused["single_launch"]
    assert plan["deterministic"]["requests"] == "none"
    assert "no deterministic Toy" in plan["deterministic"]["why"]
    assert "a token and 1 KiB a sequence" in tessera("plan", "--arch=h100", *where)
    assert "states of sequences, of drafts and 32 snapshots 0.00 GiB" in " ".join(
        tessera(*size).split()
    )


def problem(folder, arch):
    config = ModelConfig.from_folder(folder)
    return ModelProblem(config.network, "float32", unquantized(torch.float32), arch)


def test_executors_that_do_not_read_the_part_refuse_it_by_name(folder):
    it = problem(folder, CATALOGUE["h100"])
    network = it.network

    assert "no Toy" in single_launch.unsupported(it)
    reasons = cpu_library.unsupported(network, fp8_cache=False, num_ranks=1)
    assert "no Toy" in reasons


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"deterministic": True}, "no deterministic Toy"),
        ({"queries": 3, "num_logits": 3}, "no Toy of drafts"),
    ],
    ids=["deterministic", "drafts"],
)
def test_steps_that_a_state_does_not_allow_are_refused_by_name(folder, changes, reason):
    bucket = Bucket(**({"rows": 1, "columns": 1, "num_logits": 1} | changes))

    assert executor.LAYERS.unsupported(problem(folder, CATALOGUE["h100"]), bucket) == (reason,)


def test_a_layer_without_a_row_of_the_table_is_refused_by_name(folder, monkeypatch):
    it = problem(folder, detect("cpu"))
    monkeypatch.delitem(tables.MIXERS, toy_mixer.Toy)

    bucket = Bucket(rows=1, columns=1, num_logits=1)
    assert executor.LAYERS.unsupported(it, bucket) == ("no Toy",)


def test_several_ranks_are_refused_by_name(folder, start):
    assert ModelConfig.from_folder(folder).parallel_unsupported(1) == ()

    with pytest.raises(StartupError, match="no tensor parallelism of Toy"):
        start(tensor_parallel=2)


def test_a_checkpoint_of_it_is_saved_and_loaded(folder, tmp_path):
    config = ModelConfig.from_folder(folder)
    model = load_model(folder, config, torch.float32, "cpu", "dummy", pack=False)
    save_checkpoint(model, tmp_path)
    loaded = load_model(
        tmp_path, ModelConfig.from_folder(tmp_path), torch.float32, "cpu", pack=False
    )

    expected = model.state_dict()
    assert "layers.0.input.numbers" in expected
    assert expected.keys() == loaded.state_dict().keys()
    assert all(torch.equal(it, expected[name]) for name, it in loaded.state_dict().items())

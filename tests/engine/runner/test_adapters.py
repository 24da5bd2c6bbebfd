"""The engine with adapters: each request gets the tokens that it gets alone, whatever others run beside it."""

import copy
import dataclasses
import random
import shutil
from concurrent.futures import Future

import pytest

from benchmarks.local_engine import LocalEngine
from kernels.cpu.library import load as load_library
from model.adapters.adapter import AdapterReader
from model.checkpoint.config import ModelConfig
from model.sampling.parameters import SamplingParams
from server.engine.core.messages import EngineConfig
from server.engine.core.request import AdapterRef, FinishReason, GenerateRequest
from server.engine.core.start_checks import StartupError
from tests.model.adapters.peft_adapters import ALL_LINEAR, adapted, all_linear
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.oracle import generated

NAMES = ("a", "b", "c", "d", "e")
needs_library = pytest.mark.skipif(
    isinstance(load_library(), str), reason="the C library does not run here"
)


class Served:
    """A checkpoint with adapters of several ranks, and the models of PEFT."""

    def __init__(self, folder, case, targets=None):
        self.folder = folder
        plain = case.save(folder / "base")
        self.models = {None: plain.eval()}
        for seed, name in enumerate(NAMES):
            self.models[name] = adapted(
                copy.deepcopy(plain),
                folder / name,
                (4, 16, 1, 8, 16)[seed],
                targets,
                seed,
                0.3,
            )
        reader = AdapterReader(ModelConfig.from_folder(folder / "base"), 16)
        self.refs = {
            it: AdapterRef(it, str(folder / it), reader.read(folder / it).digest) for it in NAMES
        }

    def engine(self, **changes):
        config = {
            "model_path": str(self.folder / "base"),
            "model_id": "tiny",
            "device": "cpu",
            "dtype": "float32",
            "max_model_len": 256,
            "kv_cache_tokens": 4096,
            "block_size": 8,
            "cpu_threads": 1,
            "max_loras": 2,
            "max_lora_rank": 16,
            "max_cpu_loras": 3,
        }
        return LocalEngine(EngineConfig(**(config | changes)))

    def request(self, number, prompt, name, count=12, *, logprobs=False, **options):
        return GenerateRequest(
            request_id=number,
            prompt_token_ids=prompt,
            sampling=SamplingParams(max_new_tokens=count, temperature=0.0, logprobs=logprobs),
            adapter=self.refs.get(name),
            **options,
        )


@pytest.fixture(scope="module")
def served(tmp_path_factory):
    return Served(tmp_path_factory.mktemp("served"), CASES["llama"])


def tokens(events):
    return [event.token_id for event in events]


def random_prompt(rng, low=10, high=40):
    return [rng.randrange(VOCAB_SIZE) for _ in range(rng.randint(low, high))]


def assert_all_free(engine):
    stats = engine.engine.stats()
    assert stats.num_free_blocks == stats.num_blocks
    assert stats.num_running == stats.num_waiting == 0
    assert engine.engine._adapters.idle_violations() == []
    engine.engine._adapters.check_invariants()


HYBRIDS = ("qwen3.5", "lfm2", "granite4", "bamba", "falcon h1")


@pytest.fixture(scope="module")
def hybrid(request, tmp_path_factory):
    folder = tmp_path_factory.mktemp("hybrid")
    return Served(folder, CASES[request.param], ALL_LINEAR)


def test_the_tokens_of_a_request_are_those_of_peft(served):
    check_tokens(served, random_prompt(random.Random(0)))


@pytest.mark.parametrize("hybrid", HYBRIDS, indirect=True)
def test_the_tokens_of_a_request_to_a_hybrid_are_those_of_peft(hybrid):
    prompt = random_prompt(random.Random(0), 100, 100)
    check_tokens(hybrid, prompt, quantization="none", max_num_batched_tokens=64)


def check_tokens(served, prompt, **changes):
    """Compare the tokens of an engine with those of PEFT, up to the first that is a matter of rounding."""
    engine = served.engine(**changes)

    names = (None, *NAMES)
    answers = engine.generate([served.request(i, prompt, it) for i, it in enumerate(names)])

    for name, events in zip(names, answers, strict=True):
        expected = generated(served.models[name], prompt, 12)
        best = expected.logits.topk(2).values
        clear = (best[:, 0] - best[:, 1] > 1e-3).int().cumprod(0).sum()
        assert clear > 2
        assert tokens(events)[:clear] == expected.tokens[:clear]
    assert len({tuple(tokens(it)) for it in answers}) == len(names)
    assert_all_free(engine)


@pytest.mark.parametrize("cache", [4096, 160], ids=["", "preemptions"])
def test_requests_with_more_adapters_than_slots_get_the_tokens_that_each_gets_alone(served, cache):
    rng = random.Random(1)
    beginnings = [random_prompt(rng, 16, 16) for _ in range(2)]
    cases = [
        (rng.choice(beginnings) + random_prompt(rng, 1, 20), rng.choice((None, *NAMES)))
        for _ in range(24)
    ]
    alone = served.engine(enable_prefix_caching=False, max_num_seqs=1)
    expected = [
        tokens(alone.generate([served.request(i, prompt, name)])[0])
        for i, (prompt, name) in enumerate(cases)
    ]
    engine = served.engine(kv_cache_tokens=cache)

    answers = engine.generate([served.request(i, *it) for i, it in enumerate(cases)], streams=8)

    assert [tokens(it) for it in answers] == expected
    stats = engine.engine.stats()
    assert stats.num_adapter_evictions > 0
    assert stats.prefix_cache_hit_tokens > 0
    assert (stats.num_preemptions > 0) == (cache == 160)
    assert_all_free(engine)


@pytest.mark.parametrize("hybrid", HYBRIDS, indirect=True)
@pytest.mark.parametrize("streams", [1, 8], ids=["one after the other", "at the same time"])
def test_states_in_the_prefix_cache_are_those_of_the_adapter(hybrid, streams):
    rng = random.Random(6)
    beginning = random_prompt(rng, 130, 130)
    names = (None, "a", "b", "c", None, "a", "b", "c", "d", "d")
    cases = [(beginning + random_prompt(rng, 5, 20), it) for it in names]
    alone = hybrid.engine(quantization="none", enable_prefix_caching=False, max_num_seqs=1)
    requests = [hybrid.request(i, *it) for i, it in enumerate(cases)]
    expected = [tokens(alone.generate([it])[0]) for it in requests]
    engine = hybrid.engine(quantization="none")
    started, send = {}, engine.channel.send

    def note(message):
        started.update((it.request_id, it.num_cached_tokens) for it in message.started)
        send(message)

    engine.channel.send = note
    answers = engine.generate(requests, streams=streams)

    assert [tokens(it) for it in answers] == expected
    first = [names.index(it) for it in (None, *NAMES[:4])]
    assert [bool(started[i]) for i in range(len(names))] == [
        i not in first for i in range(len(names))
    ]
    assert_all_free(engine)


@pytest.mark.parametrize("quantization", ["none", pytest.param("int8", marks=needs_library)])
@pytest.mark.parametrize("hybrid", HYBRIDS, indirect=True)
def test_preempted_requests_to_a_hybrid_get_the_tokens_that_each_gets_alone(hybrid, quantization):
    rng = random.Random(7)
    beginnings = [random_prompt(rng, 64, 64) for _ in range(2)]
    cases = [
        (rng.choice(beginnings) + random_prompt(rng, 1, 20), rng.choice((None, *NAMES)))
        for _ in range(16)
    ]
    options = {"quantization": quantization, "dtype": "auto"}
    alone = hybrid.engine(**options, enable_prefix_caching=False, max_num_seqs=1)
    requests = [hybrid.request(i, *it, 24) for i, it in enumerate(cases)]
    expected = [tokens(alone.generate([it])[0]) for it in requests]
    engine = hybrid.engine(**options, kv_cache_tokens=256, max_model_len=128)

    answers = engine.generate(requests, streams=8)

    assert [tokens(it) for it in answers] == expected
    stats = engine.engine.stats()
    assert stats.num_preemptions > 0
    assert stats.num_adapter_evictions > 0
    assert_all_free(engine)


def test_cached_prefixes_are_those_of_the_adapter(served, tmp_path):
    prompt = random_prompt(random.Random(2), 40, 40)
    engine = served.engine()

    for number, name in enumerate((None, "a", "b", "a")):
        engine.generate([served.request(number, prompt, name)])
        hits = engine.engine.stats().prefix_cache_hit_tokens
        assert hits == (32 if number == 3 else 0)
    shutil.copytree(served.folder / "c", tmp_path / "a")
    other = AdapterRef("a", str(tmp_path / "a"), served.refs["c"].digest)
    again = GenerateRequest(
        request_id=9,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_new_tokens=12, temperature=0.0),
        adapter=other,
    )
    changed = engine.generate([again])[0]

    assert engine.engine.stats().prefix_cache_hit_tokens == 32, "other weights under the same name"
    expected = engine.generate([served.request(10, prompt, "c")])[0]
    assert tokens(changed) == tokens(expected)


def test_files_that_have_changed_end_their_requests_only(served, tmp_path):
    shutil.copytree(served.folder / "a", tmp_path / "a")
    ref = AdapterRef("a", str(tmp_path / "a"), served.refs["b"].digest)
    prompt = random_prompt(random.Random(3))
    engine = served.engine()
    broken = GenerateRequest(
        request_id=1,
        prompt_token_ids=prompt,
        sampling=SamplingParams(max_new_tokens=4),
        adapter=ref,
    )

    events, others = engine.generate([broken, served.request(2, prompt, "c", 4)])

    assert events[-1].finish_reason is FinishReason.ERROR
    assert "have changed since it was loaded" in events[-1].error
    assert others[-1].finish_reason is FinishReason.LENGTH
    assert_all_free(engine)


def test_the_plan_says_what_computes_a_step_with_an_adapter(served):
    plan = served.engine().engine.info.plan

    assert plan.adapters.step == "decode of 1 sequence with an adapter"
    assert plan.adapters.executor == "layers"
    refused = {it.kernel: it.reasons for it in plan.adapters.refused}
    assert refused["single_launch"][0] == "no adapter of sequences"
    assert served.engine(max_loras=0).engine.info.plan.adapters is None


def test_an_engine_without_slots_refuses_adapters(served):
    engine = served.engine(max_loras=0)
    (events,) = engine.generate([served.request(1, [1, 2, 3], "a")])
    assert "no slots for adapters: set --max-loras" in events[-1].error


def test_slots_that_memory_does_not_hold_are_refused(served, monkeypatch):
    from server.engine.runner.start.startup import _reserve_adapters

    engine = served.engine(max_loras=0)
    huge = EngineConfig(model_path="", model_id="", max_loras=256, max_lora_rank=256)
    monkeypatch.setattr("server.engine.runner.start.startup.free_bytes", lambda _: 1000)
    with pytest.raises(
        StartupError, match=r"256 slots for adapters of rank 256 need .* set --max-loras"
    ):
        _reserve_adapters(engine.engine._runner.model, huge)


@pytest.mark.parametrize(
    "case",
    [
        "llama",
        pytest.param("phi3", marks=pytest.mark.slow),
        pytest.param("gpt2", marks=pytest.mark.slow),
    ],
)
def test_ranks_that_share_a_model_give_the_replies_of_one_process(case, tmp_path):
    served = Served(tmp_path, CASES[case], all_linear(case))
    rng = random.Random(3)
    cases = [(random_prompt(rng), it) for it in (None, *NAMES, "c", None, "e", *NAMES, "a")]

    def answers(**changes):
        engine = served.engine(quantization="none", **changes)
        try:
            requests = [served.request(i, *it, logprobs=True) for i, it in enumerate(cases)]
            found = engine.generate(requests[:9], streams=4)
            found += engine.generate(requests[9:], streams=1)
            stats = engine.engine.stats()
            assert_all_free(engine)
        finally:
            engine.close()
        return found, stats

    expected, _ = answers()
    found, stats = answers(tensor_parallel=2)

    assert stats.num_adapter_evictions > 0
    assert stats.num_adapter_reads > len(NAMES), "one has left the host memory"
    assert [tokens(it) for it in found] == [tokens(it) for it in expected]
    for events, others in zip(found, expected, strict=True):
        logprobs = [it.logprob for it in others]
        assert [it.logprob for it in events] == pytest.approx(logprobs, abs=1e-3)


def test_an_adapter_that_has_changed_ends_only_its_requests_where_ranks_share_a_model(
    served, tmp_path
):
    changed = tmp_path / "changed"
    shutil.copytree(served.folder / "a", changed)
    reader = AdapterReader(ModelConfig.from_folder(served.folder / "base"), 16)
    served.refs["changed"] = AdapterRef("changed", str(changed), reader.read(changed).digest)
    (changed / "adapter_config.json").write_bytes(
        (changed / "adapter_config.json").read_bytes() + b" "
    )
    engine = served.engine(quantization="none", tensor_parallel=2)
    try:
        requests = [served.request(i, [1, 2, 3], it) for i, it in enumerate(("changed", "a", "b"))]
        found = engine.generate(requests)
        assert_all_free(engine)
    finally:
        engine.close()

    assert "have changed since it was loaded" in found[0][-1].error
    assert [len(it) for it in found[1:]] == [12, 12]


@needs_library
def test_drafts_of_requests_with_adapters_change_no_token(tmp_path):
    case = dataclasses.replace(
        CASES["llama"], changes={"hidden_size": 128, "intermediate_size": 192}
    )
    served = Served(tmp_path, case)
    rng = random.Random(4)
    prompts = [random_prompt(rng) for _ in range(12)]
    names = [rng.choice((None, *NAMES)) for _ in prompts]
    options = {"dtype": "auto", "quantization": "int8", "max_loras": 3}
    plain = served.engine(**options, max_draft_tokens=0)
    expected = [
        tokens(plain.generate([served.request(i, prompt, name, 24)])[0])
        for i, (prompt, name) in enumerate(zip(prompts, names, strict=True))
    ]
    engine = served.engine(**options)
    requests = [
        served.request(i, prompt, name, 24, prediction=[*answer[:9], 5, *answer[10:]])
        for i, (prompt, name, answer) in enumerate(zip(prompts, names, expected, strict=True))
    ]

    answers = engine.generate(requests, streams=6)

    assert [tokens(it) for it in answers] == expected
    assert engine.engine.stats().num_accepted_tokens > 0
    assert_all_free(engine)


@needs_library
@pytest.mark.slow
def test_20000_requests_over_three_slots_get_the_tokens_that_each_gets_alone(tmp_path):
    case = dataclasses.replace(
        CASES["llama"], changes={"hidden_size": 128, "intermediate_size": 192}
    )
    served, rng = Served(tmp_path, case), random.Random(5)
    options = {"dtype": "auto", "quantization": "int8", "max_loras": 3, "max_cpu_loras": 4}
    prompts = [random_prompt(rng, 4, 40) for _ in range(20)]
    cases = [(prompt, name) for prompt in prompts for name in (None, *NAMES)]
    alone = served.engine(**options, enable_prefix_caching=False)
    expected = [tokens(alone.generate([served.request(0, *it, 6)])[0]) for it in cases]
    engine = served.engine(**options)

    chosen = [rng.randrange(len(cases)) for _ in range(20_000)]
    requests = [served.request(i, *cases[at], 6) for i, at in enumerate(chosen)]
    answers = engine.generate(requests, streams=32)

    wrong = sum(tokens(it) != expected[at] for it, at in zip(answers, chosen, strict=True))
    assert wrong == 0
    assert engine.engine.stats().num_adapter_evictions > 100
    assert_all_free(engine)


class ReadAtOnce:
    """Takes the place of the executor that reads adapters, so that the order does not depend on threads."""

    def __init__(self, *_):
        pass

    def submit(self, function, *arguments):
        future = Future()
        try:
            future.set_result(function(*arguments))
        except Exception as error:  # noqa: BLE001 - as an executor does
            future.set_exception(error)
        return future


def test_queued_requests_do_not_keep_the_slot_of_their_adapter(served, monkeypatch):
    monkeypatch.setattr("server.engine.runner.step.adapters.ThreadPoolExecutor", ReadAtOnce)
    rng = random.Random(3)
    names = [NAMES[0]] * 6 + [NAMES[1]] * 2
    cases = [(random_prompt(rng, 4, 8), name) for name in names]
    engine = served.engine(max_loras=1, max_num_seqs=2)

    answers = engine.generate([served.request(i, *it) for i, it in enumerate(cases)], streams=8)

    alone = served.engine(max_num_seqs=1)
    for i, (case, answer) in enumerate(zip(cases, answers, strict=True)):
        assert tokens(answer) == tokens(alone.generate([served.request(i, *case)])[0])
    assert engine.engine.stats().num_adapter_evictions >= 2, "the second adapter runs in between"
    assert_all_free(engine)

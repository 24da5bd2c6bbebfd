"""Structured output on a GPU: grammars are followed in processes, and their masks are copied to the device."""

import pytest

from benchmarks.local_engine import LocalEngine
from benchmarks.structured_output import LONG_SCHEMA
from model.checkpoint.config import ModelConfig
from model.hub.resolve import resolve
from model.sampling.grammar import GrammarTokenizer, compile_matcher, serialize
from model.sampling.grammar_processes import GrammarProcesses
from model.sampling.parameters import SamplingParams
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import EngineConfig
from server.engine.core.request import FinishReason, GenerateRequest

pytestmark = pytest.mark.gpu

KINDS = [
    ("json_schema", LONG_SCHEMA),
    ("regex", "[a-f]{3,90}(-[0-9]{4}){1,9}"),
    ("choice", ["alpha beta", "alpha gamma", "delta"]),
    ("json_object", None),
]
SAMPLING = [
    {"temperature": 0.0},
    {"temperature": 1.0},
    {"temperature": 0.8, "top_p": 0.9, "top_k": 50},
    {"temperature": 1.0, "logprobs": True, "top_logprobs": 2},
    {"temperature": 1.0, "min_new_tokens": 9, "bad_words": ((104, 105),)},
    {"temperature": 0.7, "repetition_penalty": 1.2, "logit_bias": {34: 2.0}},
]


@pytest.fixture(scope="module")
def engine():
    config = EngineConfig(
        model_path=str(resolve("bundled")), model_id="bundled", device="cuda", max_num_seqs=64
    )
    return LocalEngine(config)


def requests(tokenizer, first, count):
    prompt = tokenizer.encode("A list of users as JSON:\n")
    found = []
    for i in range(first, first + count):
        grammar = serialize(*KINDS[i % len(KINDS)]) if i % 5 else None
        sampling = SAMPLING[i % len(SAMPLING)] | {"seed": i % 1000, "eos_token_ids": (0,)}
        parameters = SamplingParams(max_new_tokens=96, grammar=grammar, **sampling)
        found.append(
            GenerateRequest(request_id=i, prompt_token_ids=prompt[: 1 + i % 9], sampling=parameters)
        )
    return found


def test_every_token_of_many_requests_together_is_allowed_by_its_grammar(engine):
    folder = resolve("bundled")
    tokenizer, config = Tokenizer.from_folder(folder), ModelConfig.from_folder(folder)
    vocabulary = GrammarTokenizer(tokenizer, config.network.vocab, config.eos_token_ids)
    for recorded in (False, True):
        while recorded and engine.engine._runner.use_idle_time():
            pass
        batch = requests(tokenizer, 1000 * (1 + recorded), 100)
        for request, events in zip(batch, engine.generate(batch), strict=True):
            assert events[-1].finish_reason in {FinishReason.EOS, FinishReason.LENGTH}, events[-1]
            if request.sampling.grammar is None:
                continue
            matcher = compile_matcher(vocabulary, request.sampling.grammar)
            ids = [event.token_id for event in events]
            ends = ids[-1] == 0
            assert all(matcher.accept(token_id) for token_id in ids[: -1 if ends else None])
            if events[-1].finish_reason is FinishReason.EOS:
                assert matcher.is_accepting
    assert isinstance(engine.engine._runner._grammars._follower, GrammarProcesses)


def test_an_output_does_not_depend_on_the_other_requests(engine):
    tokenizer = Tokenizer.from_folder(resolve("bundled"))
    batch = [
        GenerateRequest(
            request_id=5000 + i,
            prompt_token_ids=[1, 2, 3],
            sampling=SamplingParams(
                max_new_tokens=40, temperature=1.0, seed=i, grammar=serialize("json_schema", LONG_SCHEMA)
            ),
            deterministic=True,
        )
        for i in range(8)
    ]  # fmt: skip
    together = engine.generate(batch)
    alone = [engine.generate([request])[0] for request in batch]

    assert [[event.token_id for event in events] for events in together] == [
        [event.token_id for event in events] for events in alone
    ]
    assert all(tokenizer.decode([e.token_id for e in events])[0] == "[" for events in together)

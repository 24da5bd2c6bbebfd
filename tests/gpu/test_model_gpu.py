"""The bundled model on the GPU against the CPU and transformers; synchronization, memory and errors of steps."""

import argparse
import gc
import heapq
import json.decoder
import json.encoder
import math
import subprocess
import sys
import textwrap
import time
import warnings
from pathlib import Path

import pytest
import torch

import kernels
import model.executors.layers.attention_plans
import server.engine.runner.step.model_runner
from benchmarks.local_engine import LocalEngine
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.device.transfer import Download
from model.hub.resolve import BUNDLED, resolve
from model.sampling.parameters import SamplingParams
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest
from server.engine.runner.start.kv_sizes import GPU_HEADROOM_BYTES
from tests.gpu.python_headers import HEADERS
from tests.gpu.synchronization import forbid_synchronization
from tests.model.executors.paged import PagedDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

FOLDER = resolve(BUNDLED)
NUM_TOKENS = 256
TEXTS = [
    Path(module.__file__).read_text(encoding="utf-8")
    for module in (argparse, heapq, json.decoder, json.encoder, subprocess, textwrap)
]


@pytest.fixture(scope="module")
def tokenizer():
    return Tokenizer.from_folder(FOLDER)


@pytest.fixture
def make_engine():
    """Make engines; free their memory after the test."""
    made = []

    def make(**changes):
        config = {
            "model_path": str(FOLDER),
            "model_id": BUNDLED,
            "device": "cuda",
            "dtype": "float32",
            "kv_cache_tokens": 20480,
        }
        made.append(LocalEngine(EngineConfig(**(config | changes))))
        return made[-1]

    yield make
    made.clear()
    gc.collect()
    torch.cuda.empty_cache()


def requests(tokenizer, texts, num_tokens=NUM_TOKENS, first_id=1, **sampling):
    params = {"max_new_tokens": num_tokens, "temperature": 0.0} | sampling
    return [
        GenerateRequest(
            request_id=number,
            prompt_token_ids=tokenizer.encode(text),
            sampling=SamplingParams(**params),
        )
        for number, text in enumerate(texts, start=first_id)
    ]


def tokens(events):
    return [event.token_id for event in events]


# --- against the CPU --------------------------------------------------------------------------------------------


def test_greedy_tokens_in_float32_equal_those_of_the_cpu(tokenizer, make_engine, record_property):
    assert not torch.backends.cuda.matmul.allow_tf32
    assert len(set(HEADERS)) == 50
    asked = requests(tokenizer, HEADERS, logprobs=True, top_logprobs=2)
    seconds, answers = {}, {}
    for device, threads in (("cuda", None), ("cpu", 8)):
        engine = make_engine(device=device, cpu_threads=threads)
        start = time.perf_counter()
        answers[device] = engine.generate(asked)
        seconds[device] = time.perf_counter() - start

    gaps = sorted(
        event.top_tokens[0][1] - event.top_tokens[1][1]
        for events in answers["cpu"]
        for event in events
    )
    differing = []
    for header, ours, theirs in zip(HEADERS, answers["cuda"], answers["cpu"], strict=True):
        assert len(ours) == len(theirs) == NUM_TOKENS
        if tokens(ours) != tokens(theirs):
            differing.append(_first_difference(header, ours, theirs))
    record_property(
        "proof",
        f"greedy float32, GPU = CPU: {50 - len(differing)} of 50 prompts x {NUM_TOKENS} tokens; smallest gap "
        f"between the two most probable tokens {gaps[0]:.1e}; GPU {seconds['cuda']:.1f} s, CPU {seconds['cpu']:.1f} s",
    )
    assert not differing, "\n".join(differing)


def _first_difference(header, ours, theirs):
    at = next(
        i
        for i, pair in enumerate(zip(tokens(ours), tokens(theirs), strict=True))
        if len(set(pair)) > 1
    )
    return f"{header!r}: token {at}: GPU {ours[at].top_tokens}, CPU {theirs[at].top_tokens}"


@pytest.mark.parametrize("budget", [16, 64, 100])
def test_prefill_in_chunks_gives_the_tokens_of_prefill_at_once(tokenizer, make_engine, budget):
    asked = requests(tokenizer, [text[:1500] for text in TEXTS], 48)
    whole = make_engine(enable_prefix_caching=False, max_num_batched_tokens=4096).generate(asked)
    chunked = make_engine(
        enable_prefix_caching=False, max_num_batched_tokens=budget, max_num_seqs=8
    ).generate(asked)

    assert [tokens(events) for events in chunked] == [tokens(events) for events in whole]


def test_a_prefix_hit_gives_the_tokens_of_a_miss(tokenizer, make_engine):
    asked = requests(tokenizer, [TEXTS[0][:1500] + header for header in HEADERS[:8]], 48)
    missed = make_engine(enable_prefix_caching=False).generate(asked)
    engine = make_engine()
    engine.generate(asked[:1])
    before = engine.engine.stats().prefix_cache_hit_tokens

    hit = engine.generate(asked)

    assert engine.engine.stats().prefix_cache_hit_tokens - before > 8 * 256
    assert [tokens(events) for events in hit] == [tokens(events) for events in missed]


def test_cascade_decode_gives_the_tokens_of_plain_decode(tokenizer, make_engine, monkeypatch):
    if kernels.detect("cuda").sm < 80:
        pytest.skip("no row supports a shared prefix before sm_80")
    asked = requests(tokenizer, [TEXTS[0][:1500] + header for header in HEADERS[:16]], 48)
    answers, planned = [], []

    def recording(problem, batch, *more):
        planned.append(plan_attention(problem, batch, *more))
        return planned[-1]

    plan_attention = kernels.plan_attention
    monkeypatch.setattr(model.executors.layers.attention_plans, "plan_attention", recording)
    for is_faster in (False, True):
        monkeypatch.setattr(
            server.engine.runner.step.model_runner,
            "shared_prefix_is_faster",
            lambda *_, is_faster=is_faster: is_faster,
        )
        engine = make_engine()
        engine.generate(asked[:1])
        planned.clear()
        answers.append([tokens(events) for events in engine.generate(asked)])
        assert any(plan.prefix is not None for plan in planned) is is_faster

    assert answers[0] == answers[1]


def test_preempted_sequences_give_the_same_tokens(tokenizer, make_engine):
    asked = requests(tokenizer, HEADERS[:16], 128)
    expected = make_engine().generate(asked)
    engine = make_engine(kv_cache_tokens=1024, enable_prefix_caching=False)

    preempted = engine.generate(asked)

    assert engine.engine.stats().num_preemptions > 0
    assert [tokens(events) for events in preempted] == [tokens(events) for events in expected]


# --- against transformers ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def half_precision(tokenizer):
    """Token ids [6, 512], float32 logits of transformers, and its errors in bfloat16."""
    ids = [tokenizer.encode(text)[:512] for text in TEXTS]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # from transformers and its optional dependencies
        transformers = pytest.importorskip("transformers")
        truth, theirs = (
            _oracle_logits(transformers, ids, dtype) for dtype in (torch.float32, torch.bfloat16)
        )
    return ids, truth, _errors(theirs, truth)


def _oracle_logits(transformers, ids, dtype):
    model = transformers.AutoModelForCausalLM.from_pretrained(FOLDER, dtype=dtype).cuda()
    with torch.inference_mode():
        return [model(torch.tensor([line], device="cuda")).logits[0].float() for line in ids]


def _errors(logits, truth):
    """Return the largest and the root mean square difference over all texts."""
    difference = torch.cat(logits) - torch.cat(truth)
    assert difference.isfinite().all()
    return difference.abs().max().item(), difference.square().mean().sqrt().item()


@pytest.mark.parametrize("chunk", [512, 100, 1], ids=["at once", "in chunks", "token by token"])
def test_the_error_of_bfloat16_logits_is_at_most_twice_that_of_transformers(
    half_precision, chunk, record_property
):
    ids, truth, theirs = half_precision
    config = ModelConfig.from_folder(FOLDER)
    model = load_model(FOLDER, config, torch.bfloat16, torch.device("cuda"))
    driver = PagedDriver(model, num_blocks=1024)
    parts = [[] for _ in ids]
    for start in range(0, 512, chunk):
        logits = driver.step({i: line[start : start + chunk] for i, line in enumerate(ids)})
        for i, part in logits.items():
            parts[i].append(part.float())

    ours = _errors([torch.cat(part) for part in parts], truth)

    record_property(
        "proof",
        f"bfloat16 logits against float32, chunks of {chunk}: largest error {ours[0]:.3f} "
        f"(transformers {theirs[0]:.3f}, ratio {ours[0] / theirs[0]:.2f}), root mean square {ours[1]:.4f} "
        f"({theirs[1]:.4f}, {ours[1] / theirs[1]:.2f})",
    )
    assert ours[0] <= 2 * theirs[0]
    assert ours[1] <= 2 * theirs[1]


# --- synchronization, memory, errors ----------------------------------------------------------------------------


def fill(engine, asked):
    engine.channel.inbox += asked
    engine.engine.receive(wait=math.inf)


def test_a_step_synchronizes_only_to_read_its_tokens(tokenizer, make_engine, monkeypatch):
    engine = make_engine(dtype="bfloat16")
    read, reads = Download.read, []
    sampled = requests(
        tokenizer, HEADERS[:8], 20, temperature=0.8, top_k=40, repetition_penalty=1.1
    )
    greedy = requests(tokenizer, HEADERS[8:20], 20, first_id=9)
    fill(engine, sampled + greedy)
    engine.engine.step()
    engine.engine.step()

    def counting(download):
        reads.append(download)
        return read(download)

    monkeypatch.setattr(Download, "read", counting)
    with forbid_synchronization():
        # Each call launches a step and reads the tokens of the step before.
        engine.engine.step()
        engine.engine.step()

    assert len(reads) == 2


def test_a_running_engine_allocates_no_more_than_the_headroom_left_at_startup(
    tokenizer, make_engine, record_property
):
    engine = make_engine(dtype="bfloat16", kv_cache_tokens=None, kv_cache_gib=1.0)
    held = torch.cuda.memory_reserved()
    for sampling in (
        {"temperature": 1.0, "top_p": 0.9, "logprobs": True, "top_logprobs": 5},
        {"temperature": 1.0, "top_k": 4000, "typical_p": 0.9, "repetition_penalty": 1.3},
        {"prompt_logprobs": True, "logprobs": True},
    ):
        engine.generate(requests(tokenizer, [text[:3000] for text in TEXTS] * 10, 12, **sampling))

    taken = torch.cuda.memory_reserved() - held
    record_property("proof", f"GPU memory allocated after startup: {taken / 2**20:.0f} MiB")
    assert taken <= GPU_HEADROOM_BYTES


def test_a_step_out_of_memory_fails_its_requests_and_later_requests_succeed(
    tokenizer, make_engine, monkeypatch
):
    engine = make_engine()
    (asked,) = requests(tokenizer, HEADERS[:1], 8)
    (expected,) = engine.generate([asked])
    runner = engine.engine._runner
    monkeypatch.setattr(runner, "launch", lambda _: torch.empty(1 << 50, device="cuda"))

    (failed,) = engine.generate([asked])

    assert failed[-1].error
    monkeypatch.undo()
    assert tokens(engine.generate([asked])[0]) == tokens(expected)


BREAK_CONTEXT = """
import torch
from model.checkpoint.config import ModelConfig
from model.device.kv_cache import KVCache
from model.hub.resolve import resolve
from model.checkpoint.weights import load_model
from server.engine.runner.step.model_runner import ModelRunner

folder = resolve("bundled")
model = load_model(folder, ModelConfig.from_folder(folder), torch.bfloat16, torch.device("cuda"))
runner = ModelRunner(model, KVCache(model.network.state(torch.bfloat16), 1, 16, "cuda"))
errors = (RuntimeError("Triton Error [CUDA]: some error"), torch.AcceleratorError("CUDA error: some error"))
print("working", *map(runner.recover, errors))
torch.zeros(1, device="cuda")[torch.tensor([5], device="cuda")]
print("broken", *map(runner.recover, errors))
"""


def test_recover_distinguishes_a_broken_context_from_a_transient_error():
    done = subprocess.run(
        [sys.executable, "-c", BREAK_CONTEXT],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )

    assert "working True True\nbroken False False" in done.stdout, done.stdout + done.stderr

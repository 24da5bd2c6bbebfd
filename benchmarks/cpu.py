"""Compares the bundled model on this CPU with `transformers`, with the same checkpoint and dtype.

One run compares one stream with `transformers`' generate, eight requests with one, and HTTP with the engine alone, and
measures the time until the service is ready. Rounds alternate between the contenders, so that other load slows all of
them. All use the number of threads that the engine selects.

    python -m benchmarks.cpu [--rounds 5] [--tokens 256] [--dtype float32]
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
import urllib.request
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from benchmarks.local_engine import LocalEngine
from benchmarks.report import write_report
from benchmarks.service import service
from model.checkpoint.hub import resolve
from model.sampling.parameters import SamplingParams
from model.text.tokenizer import Tokenizer
from server.engine.core.messages import EngineConfig
from server.engine.core.request import GenerateRequest

PROMPT = "import os\nimport sys\n\n\ndef find_files(directory, suffix):\n"


def engine_seconds(engine: LocalEngine, prompt: list[int], tokens: int, streams: int) -> float:
    """Return the seconds of `streams` concurrent requests of `tokens` new tokens each."""
    sampling = SamplingParams(max_new_tokens=tokens, temperature=0.0)
    requests = [
        GenerateRequest(request_id=i, prompt_token_ids=prompt, sampling=sampling)
        for i in range(streams)
    ]
    start = time.perf_counter()
    answers = engine.generate(requests)
    seconds = time.perf_counter() - start
    assert all(len(events) == tokens for events in answers)
    return seconds


def transformers_generate(path: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Load the checkpoint in `transformers`."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds; only for this contender

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def peer_seconds(peer: Any, prompt: list[int], tokens: int) -> float:  # noqa: ANN401
    """Return the seconds of one greedy continuation of exactly `tokens` tokens."""
    ids = torch.tensor([prompt])
    start = time.perf_counter()
    with torch.inference_mode():
        out = peer.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=tokens,
            min_new_tokens=tokens,
            do_sample=False,
            pad_token_id=0,
        )
    seconds = time.perf_counter() - start
    assert out.shape[1] == len(prompt) + tokens
    return seconds


def http_seconds(url: str, tokens: int, *, stream: bool) -> float:
    """Return the seconds of one request over HTTP, measured by the client."""
    parameters = {"max_new_tokens": tokens, "temperature": 0, "ignore_eos": True}
    request = urllib.request.Request(  # noqa: S310 - loopback
        f"{url}/generate_stream" if stream else f"{url}/generate",
        json.dumps({"inputs": PROMPT, "parameters": parameters}).encode(),
        {"content-type": "application/json"},
    )
    start = time.perf_counter()
    with urllib.request.urlopen(request) as reply:  # noqa: S310
        frames = sum(line.startswith(b"data:") for line in reply) if stream else len(reply.read())
    assert frames >= (tokens if stream else 1)
    return time.perf_counter() - start


def main() -> None:
    """Run all contenders and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--dtype", default="float32")
    options = parser.parse_args()
    path, tokens = resolve("bundled"), options.tokens
    prompt = Tokenizer.from_folder(path).encode(PROMPT)

    engine = LocalEngine(
        EngineConfig(
            model_path=str(path),
            model_id="bundled",
            device="cpu",
            dtype=options.dtype,
            enable_prefix_caching=False,
        )
    )
    peer = transformers_generate(path, getattr(torch, options.dtype))
    samples: dict[str, list[float]] = {}

    def add(name: str, seconds: float) -> None:
        samples.setdefault(name, []).append(seconds)

    served = [f"--dtype={options.dtype}", "--device=cpu"]
    with service(served) as (url, ready_seconds):
        for round_ in range(options.rounds + 1):
            timings = {
                "engine 1": engine_seconds(engine, prompt, tokens, 1),
                "engine 8": engine_seconds(engine, prompt, tokens, 8),
                "transformers 1": peer_seconds(peer, prompt, tokens),
                "http 1": http_seconds(url, tokens, stream=False),
                "http stream 1": http_seconds(url, tokens, stream=True),
            }
            with ThreadPoolExecutor(8) as pool:
                start = time.perf_counter()
                list(pool.map(lambda _: http_seconds(url, tokens, stream=True), range(8)))
                timings["http stream 8"] = time.perf_counter() - start
            if round_:  # the first round warms up
                for name, seconds in timings.items():
                    add(name, seconds)
    medians = {name: statistics.median(values) for name, values in samples.items()}
    rows: list[dict[str, Any]] = [
        {
            "model": "bundled",
            "metric": "decode_tok_s",
            "contender": name,
            "batch": int(name.split()[-1]),
            "value": round(tokens * int(name.split()[-1]) / seconds, 1),
            "ms_per_token": round(1000 * seconds / tokens, 3),
            "ms_per_token_fastest": round(1000 * min(samples[name]) / tokens, 3),
            "ms_per_token_slowest": round(1000 * max(samples[name]) / tokens, 3),
        }
        for name, seconds in medians.items()
    ]
    ratios = {
        "one stream beside transformers": medians["transformers 1"] / medians["engine 1"],
        "eight requests beside one": 8 * medians["engine 1"] / medians["engine 8"],
        "HTTP beside engine, time per token": medians["http 1"] / medians["engine 1"],
        "HTTP stream beside engine, time per token": medians["http stream 1"] / medians["engine 1"],
    }
    rows += [{"metric": "ratio", "contender": k, "value": round(v, 3)} for k, v in ratios.items()]
    rows.append({"model": "bundled", "metric": "ready_s", "value": round(ready_seconds, 2)})
    libraries = ("torch", "transformers", "tokenizers")
    plan = {phase.phase: phase.why for phase in engine.engine.info.plan.phases}
    write_report("cpu", rows, libraries, extra={"plan": plan})


if __name__ == "__main__":
    main()

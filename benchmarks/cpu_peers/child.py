"""Measures one contender in a process of its own and prints its figures as JSON.

python -m benchmarks.cpu_peers.child engine --work JSON [flags of `tessera serve`]
python -m benchmarks.cpu_peers.child transformers --work JSON MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu_peers.work import Work
from server.cli.bench.engine.run import EngineRun
from server.cli.command_settings import engine_config, find_model, read_settings
from server.engine.link.engine_process.process_setup import (
    freeze_startup_objects,
    set_passive_openmp_wait,
)

_WARM_TOKENS = 8


def measure_engine(work: Work, options: list[str]) -> dict[str, Any]:
    """Measure the engine without HTTP: tokens per second of decoding and of prompts."""
    set_passive_openmp_wait()
    settings = read_settings(options, "bench engine")
    engine = EngineRun(engine_config(settings, find_model(settings)[0]))
    engine.use_idle_time()
    freeze_startup_objects()
    generator = np.random.default_rng(0)

    def requests(streams: int, prompt: int, tokens: int) -> list[Any]:
        return engine.random_requests([prompt] * streams, [tokens] * streams, generator)

    figures: dict[str, float] = {}
    for streams in work.streams:
        engine.run(requests(streams, work.prompt, _WARM_TOKENS))
        trace = engine.run(requests(streams, work.prompt, work.tokens))
        figures[f"decode_{streams}"] = streams * trace.decode_steps / trace.decode_seconds
    for prompt in work.prefills:
        engine.run(requests(1, prompt, 1))
        figures[f"prefill_{prompt}"] = prompt / engine.run(requests(1, prompt, 1)).seconds
    info = engine.info
    about = {"quantization": info.quantization, "dtype": info.dtype}
    return {"figures": figures, "about": about}


def measure_transformers(work: Work, folder: str) -> dict[str, Any]:
    """Measure `transformers`: tokens per second of decoding one greedy sequence in float32."""
    peer = _transformers_model(Path(folder), torch.float32)
    vocabulary = peer.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, work.prompt).tolist()
    _seconds_of(peer, prompt, _WARM_TOKENS)
    first = _seconds_of(peer, prompt, 1)
    seconds = _seconds_of(peer, prompt, work.tokens) - first
    about = {"dtype": "float32", "threads": torch.get_num_threads()}
    return {"figures": {"decode_1": (work.tokens - 1) / seconds}, "about": about}


def _transformers_model(path: Path, dtype: torch.dtype) -> Any:  # noqa: ANN401
    """Load the checkpoint in `transformers`."""
    from transformers import AutoModelForCausalLM  # noqa: PLC0415 - seconds; only for this contender

    return AutoModelForCausalLM.from_pretrained(path, dtype=dtype)


def _seconds_of(peer: Any, prompt: list[int], tokens: int) -> float:  # noqa: ANN401
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


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("contender", choices=("engine", "transformers"))
    parser.add_argument("--work", type=Work.decode, required=True)
    options, rest = parser.parse_known_args()
    if options.contender == "engine":
        measured = measure_engine(options.work, rest)
    else:
        (folder,) = rest
        measured = measure_transformers(options.work, folder)
    print(json.dumps(measured))


if __name__ == "__main__":
    main()

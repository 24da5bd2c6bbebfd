"""Measures one contender in a process of its own and prints its figures as JSON.

python -m benchmarks.cpu_peers.child engine --work JSON [flags of `tessera serve`]
python -m benchmarks.cpu_peers.child transformers --work JSON MODEL_FOLDER
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

import numpy as np
import torch

from benchmarks.cpu import peer_seconds, transformers_generate
from benchmarks.cpu_peers.work import Work
from server.cli.bench.engine.run import EngineRun
from server.cli.command_settings import engine_config, find_model, read_settings
from server.engine.link.process_setup import freeze_startup_objects, set_passive_openmp_wait

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
    peer = transformers_generate(Path(folder), torch.float32)
    vocabulary = peer.config.vocab_size
    prompt = np.random.default_rng(0).integers(0, vocabulary, work.prompt).tolist()
    peer_seconds(peer, prompt, _WARM_TOKENS)
    first = peer_seconds(peer, prompt, 1)
    seconds = peer_seconds(peer, prompt, work.tokens) - first
    about = {"dtype": "float32", "threads": torch.get_num_threads()}
    return {"figures": {"decode_1": (work.tokens - 1) / seconds}, "about": about}


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

"""How long does one decode step of the model take on this CPU, and what do dtype and weight layout change?

Random weights of three shapes; every sequence has the same context. The engine, the sampler and the
tokenizer are not part of it.

    python -m benchmarks.forward [--threads 1 2] [--sequences 1 8] [--context 200] [--shapes bundled 600M]
"""

from __future__ import annotations

import argparse
import statistics
import time
from typing import TYPE_CHECKING, Any

import torch

from benchmarks.report import write_report
from kernels import PagedBatch
from model.checkpoint.config import ModelConfig
from model.device.kv_cache import KVCache
from model.network.decoder import DecoderLM

if TYPE_CHECKING:
    from collections.abc import Callable

BLOCK_SIZE = 16
REPEATS = 4
MIN_ROUNDS = 5

SHAPES: dict[str, dict[str, Any]] = {
    "bundled": {
        "vocab_size": 4096,
        "hidden_size": 384,
        "intermediate_size": 1024,
        "num_layers": 6,
        "num_heads": 6,
        "num_kv_heads": 2,
        "head_dim": 64,
    },
    "170M": {
        "vocab_size": 32_000,
        "hidden_size": 1024,
        "intermediate_size": 2816,
        "num_layers": 12,
        "num_heads": 16,
        "num_kv_heads": 4,
        "head_dim": 64,
    },
    "600M": {
        "vocab_size": 151_936,
        "hidden_size": 1024,
        "intermediate_size": 3072,
        "num_layers": 28,
        "num_heads": 16,
        "num_kv_heads": 8,
        "head_dim": 128,
        "qk_norm": True,
    },
}

VARIANTS = (
    (torch.float32, "row-major"),
    (torch.float32, "float32 blocks"),
    (torch.float32, "float16 blocks"),
    (torch.bfloat16, "row-major"),
    (torch.bfloat16, "bfloat16 blocks"),
    (torch.float16, "row-major"),
)


def decode_step(model: DecoderLM, sequences: int, context: int) -> Callable[[], torch.Tensor]:
    """Make a function that runs one step: plan, forward pass and logits."""
    config, blocks = model.config, -(-context // BLOCK_SIZE)
    cache = KVCache(
        config.num_layers,
        sequences * blocks,
        BLOCK_SIZE,
        config.num_kv_heads,
        config.head_dim,
        model.embed_tokens.dtype,
        "cpu",
    )
    table = torch.arange(sequences * blocks, dtype=torch.int32).view(sequences, blocks)
    last, offset = divmod(context - 1, BLOCK_SIZE)
    slots = table[:, last] * BLOCK_SIZE + offset
    batch = PagedBatch(
        cu_seqlens_q=torch.arange(sequences + 1, dtype=torch.int32),
        seq_lens=torch.full((sequences,), context, dtype=torch.int32),
        block_table=table,
        num_tokens=sequences,
        max_seqlen_q=1,
        max_seqlen_k=context,
    )
    ids = torch.arange(sequences) % config.vocab_size
    positions = torch.full((sequences,), context - 1)

    def run() -> torch.Tensor:
        metadata = model.attention_metadata(slots, BLOCK_SIZE, batch, None)
        return model.logits(model(ids, positions, cache, metadata))

    return run


def milliseconds(step: Callable[[], torch.Tensor], seconds: float) -> dict[str, float]:
    """Time a step in short rounds, so that some fall between other programs' work.

    `cpu_ms` is the calling thread's own time, which a busy machine disturbs less; with one thread it
    is the whole cost.
    """
    for _ in range(3):
        step()
    wall: list[float] = []
    cpu: list[float] = []
    end = time.perf_counter() + seconds
    while len(wall) < MIN_ROUNDS or time.perf_counter() < end:
        start, cpu_start = time.perf_counter(), time.thread_time()
        for _ in range(REPEATS):
            step()
        wall.append((time.perf_counter() - start) / REPEATS * 1e3)
        cpu.append((time.thread_time() - cpu_start) / REPEATS * 1e3)
    return {
        "min_ms": round(min(wall), 3),
        "median_ms": round(statistics.median(wall), 3),
        "cpu_ms": round(min(cpu), 3),
    }


def build(config: ModelConfig, dtype: torch.dtype, weights: str) -> DecoderLM:
    """Make a model of random weights in the layout named."""
    model = DecoderLM(config, dtype).requires_grad_(requires_grad=False)
    model.init_weights(seed=0)
    if weights == "float16 blocks":
        for parameter in model.parameters():
            parameter.copy_(parameter.bfloat16())
    if weights != "row-major":
        model.optimize()
    return model


def rows(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Measure every combination."""
    result = []
    for shape in arguments.shapes:
        config = ModelConfig(
            architecture="LlamaForCausalLM",
            max_position_embeddings=max(2048, arguments.context),
            tie_word_embeddings=True,
            **SHAPES[shape],
        )
        for dtype, weights in VARIANTS:
            model = build(config, dtype, weights)
            for threads in arguments.threads:
                torch.set_num_threads(threads)
                for sequences in arguments.sequences:
                    step = decode_step(model, sequences, arguments.context)
                    result.append(
                        {
                            "shape": shape,
                            "dtype": str(dtype).removeprefix("torch."),
                            "weights": weights,
                            "threads": threads,
                            "sequences": sequences,
                            **milliseconds(step, arguments.seconds),
                        }
                    )
    return result


def main() -> None:
    """Run and write the result file."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--shapes", nargs="+", choices=SHAPES, default=list(SHAPES))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--sequences", nargs="+", type=int, default=[1, 8])
    parser.add_argument("--context", type=int, default=200)
    parser.add_argument("--seconds", type=float, default=3.0, help="for each row")
    arguments = parser.parse_args()
    with torch.inference_mode():
        write_report("forward", rows(arguments))


if __name__ == "__main__":
    main()

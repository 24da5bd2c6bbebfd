"""`tessera size`: memory, capacity and speed, compared with counts by hand for known models."""

import json
import subprocess
import sys

import pytest

from kernels.arch import CATALOGUE
from model.checkpoint.config import ModelConfig
from model.hub.resolve import BUNDLED, resolve
from server.cli.bench.engine.options import SHAPES
from server.cli.size.estimate import BATCHES, EXPECTED_SHARE, LAYER_SECONDS
from server.engine.runner.start.kv_sizes import NCCL_BYTES

GIB = 2**30
LLAMA = ("--model", str(SHAPES / "llama-3.1-8b"))
PARAMETERS = 8_030_261_248
"""Of Llama-3.1-8B, by its model card."""
KV_BYTES = 2 * 32 * 8 * 128 * 2
"""Keys and values of a token: layers, heads, head dim, bytes."""


@pytest.fixture
def size(tessera):
    """Returns the estimate for flags."""

    def run(*flags, gpu="h100", model=LLAMA):
        status, out, err = tessera("size", f"--gpu={gpu}", "--json", *model, *flags)
        assert (status, err) == (0, "")
        return json.loads(out)

    return run


def test_weights_and_a_token_have_the_size_of_the_model(size):
    memory = size()["memory"]

    assert memory["weight_bytes"] == 2 * PARAMETERS
    assert memory["kv_bytes_per_token"] == KV_BYTES
    assert memory["total_bytes"] == CATALOGUE["h100"].memory_mib * 2**20


def test_everything_fits_into_the_memory_and_the_cache_takes_four_fifths_of_the_rest(size):
    memory = size()["memory"]

    fixed = memory["weight_bytes"] + memory["activation_bytes"] + memory["cuda_bytes"]
    cache = memory["kv_tokens"] * memory["kv_bytes_per_token"]
    assert cache == pytest.approx(0.8 * (memory["total_bytes"] - fixed), rel=0.001)


@pytest.mark.parametrize("share", [0.5, 0.9])
def test_the_cache_has_the_rest_of_the_engines_share_of_the_memory(size, share):
    memory = size(f"--gpu-memory-utilization={share}")["memory"]

    fixed = memory["weight_bytes"] + memory["activation_bytes"] + memory["cuda_bytes"]
    cache = memory["kv_tokens"] * memory["kv_bytes_per_token"]
    assert cache == pytest.approx(share * memory["total_bytes"] - fixed, rel=0.001)
    assert f"{share} of 79.65 GiB (--gpu-memory-utilization)" in memory["kv_why"]


def test_the_share_of_a_rank_has_room_for_nccl(size):
    flags = ("--gpu-memory-utilization=0.5", "--tensor-parallel=2")
    memory = size(*flags)["memory"]

    fixed = memory["weight_bytes"] + memory["activation_bytes"] + memory["cuda_bytes"] + NCCL_BYTES
    cache = memory["kv_tokens"] * memory["kv_bytes_per_token"]
    assert cache == pytest.approx(0.5 * memory["total_bytes"] - fixed, rel=0.001)


def test_slots_for_adapters_take_memory_of_the_cache(size, tessera):
    flags = ("--max-loras=16", "--max-lora-rank=20")
    plain, memory = size()["memory"], size(*flags)["memory"]

    inputs = 3 * 4096 + 4096 + 2 * 4096 + 14336  # q, k and v; output; gate and up; down
    outputs = 4096 + 2 * 1024 + 4096 + 2 * 14336 + 4096
    assert plain["adapter_bytes"] == 0
    assert memory["adapter_bytes"] == 16 * 32 * 32 * 2 * (inputs + outputs), "of rank 32"
    used = [it["kv_tokens"] * it["kv_bytes_per_token"] for it in (plain, memory)]
    assert used[0] - used[1] == pytest.approx(0.8 * memory["adapter_bytes"], rel=0.001)

    _, out, _ = tessera("size", "--gpu=h100", *LLAMA, *flags)
    assert f"slots for adapters {memory['adapter_bytes'] / GIB:.2f} GiB" in out.replace("\n", " ")


def test_ranks_share_the_slots_for_adapters(size):
    whole, half = (
        size("--max-loras=1", *more)["memory"]["adapter_bytes"]
        for more in ((), ("--tensor-parallel=2",))
    )
    assert whole / 2 < half < 0.9 * whole, "each has all of A or all of B"


def test_the_capacity_counts_whole_blocks(size):
    report = size("--kv-cache-tokens=10000", "--input-len=90", "--output-len=11")

    assert report["memory"]["kv_tokens"] == 10_000
    assert report["capacity"][0] == {"tokens": 101, "sequences": 10_000 // 112}
    assert report["capacity"][1] == {"tokens": 131_072, "sequences": 0}


def test_one_sequence_is_limited_by_reading_the_weights(size):
    (one, *_), bandwidth = size()["decode"], 1e9 * CATALOGUE["h100"].memory_bandwidth_gbs

    head = 128_256 * 4096  # of the embedding, a step reads single rows
    seconds = (2 * (PARAMETERS - head) + (1024 + 128) * KV_BYTES) / bandwidth
    assert one["bound"] == "memory"
    assert one["limit_tokens_per_second"] == pytest.approx(1 / seconds, rel=0.002)
    assert one["expected_tokens_per_second"] == pytest.approx(
        EXPECTED_SHARE * one["limit_tokens_per_second"]
    )


def test_a_layer_takes_its_time_however_small_the_model_is(size):
    one = size(model=())["decode"][0]

    layers = len(ModelConfig.from_folder(resolve(BUNDLED)).network.layers)
    assert one["expected_tokens_per_second"] == pytest.approx(1 / (layers * LAYER_SECONDS))


def test_larger_batches_are_faster_in_total_and_slower_for_each(size):
    rows = size()["decode"]

    speeds = [row["limit_tokens_per_second"] for row in rows]
    each = [row["limit_tokens_per_second"] / row["batch"] for row in rows]
    assert tuple(row["batch"] for row in rows) == BATCHES
    assert speeds == sorted(speeds)
    assert each == sorted(each, reverse=True)


def test_the_first_token_of_a_long_prompt_is_limited_by_arithmetic(size):
    tokens = 8192
    seconds = size(f"--input-len={tokens}", "--max-num-batched-tokens=8192")["first_token"]

    # Products of all weights but the embedding and the head, and attention to half of the tokens on average.
    head = 128_256 * 4096
    flops = 2 * (PARAMETERS - 2 * head) * tokens + 4 * 32 * 32 * 128 * tokens * tokens / 2
    least = flops / (1e12 * CATALOGUE["h100"].half_tflops)
    assert seconds["limit_seconds"] == pytest.approx(least, rel=0.01)


def test_a_prompt_in_chunks_reads_the_weights_for_each(size):
    short = [f"--input-len={2048}", "--max-num-seqs=16"]
    whole = size(*short, "--max-num-batched-tokens=2048")["first_token"]["limit_seconds"]
    chunks = size(*short, "--max-num-batched-tokens=64")["first_token"]["limit_seconds"]

    reading = 2 * PARAMETERS / (1e9 * CATALOGUE["h100"].memory_bandwidth_gbs)
    assert whole < chunks
    assert chunks > 0.9 * 2048 / 64 * reading


def test_a_batch_beyond_the_cache_or_the_limit_of_sequences_is_marked(size):
    few = size("--max-num-seqs=8")["decode"]
    small = size("--kv-cache-tokens=2560")["decode"]

    assert [row["fits"] for row in few] == [True, True, False, False]
    assert [row["fits"] for row in small] == [True, False, False, False]


def test_fp8_halves_layers_and_cache(size):
    exact, rounded = size()["memory"], size("--quantization=fp8", "--kv-cache-dtype=fp8")["memory"]

    assert rounded["weight_bytes"] < 0.6 * exact["weight_bytes"]
    assert rounded["kv_bytes_per_token"] == KV_BYTES // 2 + 2 * 32 * 8 * 4
    assert rounded["kv_tokens"] > 1.9 * exact["kv_tokens"]


@pytest.mark.parametrize("gpu", [key for key in CATALOGUE if key != "cpu"])
def test_the_bundled_model_fits_on_every_known_gpu(tessera, gpu):
    status, out, err = tessera("size", f"--gpu={gpu}", "--quantization=none")

    assert (status, err) == (0, "")
    assert out.startswith(CATALOGUE[gpu].name)
    assert "tokens/s at most" in out
    assert max(map(len, out.splitlines())) <= 120


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--gpu=t4", *LLAMA], "does not fit: NVIDIA T4 has 15.0 GiB, weights take 14.96 GiB"),
        (["--gpu=h100", "--kv-cache-gib=90", *LLAMA], "at most"),
        (
            ["--gpu=h100", "--max-model-len=1000"],
            "--input-len 1024 and --output-len 256 are 1280 tokens, more than the limit of 1000",
        ),
        (["--device=cpu"], "name one with --gpu"),
        (["--gpu=h100", "--model=/absent"], "/absent"),
    ],
    ids=["model", "cache", "length", "cpu", "folder"],
)
def test_what_does_not_fit_is_an_error_with_the_numbers(tessera, flags, words):
    status, out, err = tessera("size", *flags)

    assert (status, out) == (1, "")
    assert err.startswith("tessera size: error: ")
    assert words in err


@pytest.mark.parametrize("command", ["size --gpu=4090 qwen3-0.6b", "size --help", "plan --help"])
def test_without_this_machines_gpu_no_pytorch_is_imported(command):
    program = (
        "import sys\nfrom server.cli.main import main\n"
        "try:\n    main(sys.argv[1:])\nexcept SystemExit as end:\n    assert not end.code, end\n"
        "sys.exit(str({'torch', 'triton'} & {*sys.modules}) if 'torch' in sys.modules else 0)"
    )
    done = subprocess.run(
        [sys.executable, "-c", program, *command.split()],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (done.returncode, done.stderr) == (0, "")

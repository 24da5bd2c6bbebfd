"""`tessera serve` on the GPU over HTTP: concurrent requests, real model shapes, two services on one GPU."""

import concurrent.futures
import os
import subprocess
import sys
import time
from pathlib import Path

import httpx
import pytest

from kernels import detect
from tests.e2e.conftest import Service
from tests.gpu.python_headers import HEADERS

# A service allocates a share of the free memory, so concurrent tests would change its size.
pytestmark = [pytest.mark.gpu, pytest.mark.gpu_memory(None), pytest.mark.timeout(240)]

SHAPES = Path(__file__).parents[2] / "server" / "cli" / "bench" / "shapes"
START_SECONDS = 180.0


@pytest.fixture(scope="module")
def services():
    """Start services on the GPU; each start stops all others except the bundled model's and those in `keep`."""
    running = {}

    def start(*arguments, keep=()):
        for key in [key for key in running if key not in {(), arguments, *keep}]:
            running.pop(key).stop()
        if arguments not in running:
            running[arguments] = Service(["--device=cuda", *arguments])
        return running[arguments]

    yield start
    for service in running.values():
        service.stop()


def shape(name):
    return (f"--model={SHAPES / name}", "--load-format=dummy")


def ready(service):
    service.wait_until_healthy(START_SECONDS)
    return time.monotonic() - service.started


def answer(service, prompts, num_tokens):
    """Send all prompts concurrently; return the replies and the total time in seconds."""
    limits = httpx.Limits(max_connections=len(prompts))
    with (
        httpx.Client(base_url=service.url, timeout=120, limits=limits) as client,
        concurrent.futures.ThreadPoolExecutor(len(prompts)) as pool,
    ):

        def ask(prompt):
            parameters = {"max_new_tokens": num_tokens, "ignore_eos": True, "details": True}
            return client.post("/generate", json={"inputs": prompt, "parameters": parameters})

        start = time.perf_counter()
        replies = list(pool.map(ask, prompts))
        return replies, time.perf_counter() - start


def assert_answered(replies, num_tokens):
    assert {reply.status_code for reply in replies} == {200}, [reply.text for reply in replies][:2]
    counts = {reply.json()["details"]["generated_tokens"] for reply in replies}
    assert counts == {num_tokens}


def assert_idle(service):
    deadline = time.monotonic() + 5
    while service.metric("tessera_kv_blocks_free") != service.metric("tessera_kv_blocks"):
        assert time.monotonic() < deadline, "blocks are still held"
        time.sleep(0.05)


def kernels(service):
    plan = httpx.get(f"{service.url}/plan").json()
    return {phase["phase"]: phase["kernel"] for phase in plan["phases"]}


PROMPTS = [f"{HEADERS[i % len(HEADERS)]}# {i}\n" for i in range(64)]


@pytest.mark.parametrize(
    ("name", "arguments", "num_prompts"),
    [
        ("bundled model", (), 64),
        ("qwen3-0.6b", shape("qwen3-0.6b"), 64),
        ("llama-3.2-1b", shape("llama-3.2-1b"), 16),
        ("llama-3.1-8b", shape("llama-3.1-8b"), 16),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_concurrent_requests_are_all_answered_with_our_kernels(
    services, record_property, name, arguments, num_prompts
):
    service = services(*arguments)
    seconds = ready(service)
    replies, took = answer(service, PROMPTS[:num_prompts], 64)

    assert_answered(replies, 64)
    assert kernels(service).keys() == {"prefill", "decode"}
    assert not any(kernel.startswith("torch_") for kernel in kernels(service).values())
    assert_idle(service)
    blocks, info = service.metric("tessera_kv_blocks"), httpx.get(f"{service.url}/info").json()
    record_property(
        "proof",
        f"HTTP, {name} ({info['model_dtype']}): {num_prompts} of {num_prompts} concurrent /generate answered, 64 "
        f"tokens each in {took:.2f} s together; ready after {seconds:.1f} s; {blocks:.0f} KV blocks",
    )


def test_an_fp8_cache_holds_almost_twice_the_tokens_and_uses_our_kernels(services, record_property):
    if detect("cuda").sm < 89:
        pytest.skip("before sm_89 PyTorch's rows read an FP8 cache")
    blocks = []
    for more in (("--kv-cache-dtype=fp8",), ()):
        service = services(*shape("qwen3-0.6b"), "--kv-cache-gib=2", *more)
        ready(service)
        replies, took = answer(service, PROMPTS, 64)
        assert_answered(replies, 64)
        blocks.append(service.metric("tessera_kv_blocks"))
        if more:
            prefill = "hopper_fp8_prefill" if detect("cuda").sm == 90 else "portable_prefill"
            assert kernels(service) == {"prefill": prefill, "decode": "portable_decode"}
            assert httpx.get(f"{service.url}/info").json()["kv_cache_dtype"] == "float8_e4m3fn"
            assert_idle(service)
            record_property("proof", f"HTTP, FP8 cache: 64 x 64 tokens in {took:.2f} s together")

    # Per head: 128 numbers of 1 byte and a scale of 4 bytes, instead of 128 numbers of 2 bytes.
    assert blocks[0] / blocks[1] == pytest.approx(256 / 132, rel=1e-3)


def test_two_services_start_together_on_one_gpu(services, record_property):
    # Arguments that no other test uses, so that neither service is running yet.
    first_arguments, second_arguments = (
        (*shape("qwen3-0.6b"), "--block-size=16"),
        (*shape("qwen3-0.6b"), "--block-size=32"),
    )
    first = services(*first_arguments)
    second = services(*second_arguments, keep=[first_arguments])
    seconds = max(ready(first), ready(second))

    tokens = []
    for service, block_size in ((first, 16), (second, 32)):
        replies, _ = answer(service, PROMPTS[:16], 32)
        assert_answered(replies, 32)
        tokens.append(int(service.metric("tessera_kv_blocks")) * block_size)
    record_property(
        "proof",
        f"two services of qwen3-0.6b at once: both ready after {seconds:.1f} s, KV caches of {tokens[0]} and "
        f"{tokens[1]} tokens",
    )


def serve(*arguments, environment=os.environ):
    """Run `tessera serve` until it exits; return its exit status and the last line of stderr."""
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", "--port=0", "--device=cuda", *arguments],
        env=environment,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    return done.returncode, done.stderr.strip().splitlines()[-1]


def test_a_cache_larger_than_the_gpu_is_refused_with_both_sizes():
    status, line = serve("--kv-cache-gib=10000")

    assert status == 1
    for words in ("10000 GiB", "10240000 MiB", "MiB can be used", "GiB free on cuda"):
        assert words in line


def test_a_start_without_a_c_compiler_names_what_to_install(tmp_path):
    environment = {key: value for key, value in os.environ.items() if key != "CC"}
    environment |= {"PATH": str(tmp_path), "TRITON_CACHE_DIR": str(tmp_path / "cache")}
    status, line = serve(environment=environment)

    assert status == 1
    assert "apt-get install gcc" in line

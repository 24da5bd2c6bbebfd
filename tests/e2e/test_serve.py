"""`tessera serve` with the bundled model, tested over HTTP."""

import codeop
import concurrent.futures
import contextlib
import json
import os
import random
import signal
import subprocess
import sys
import threading
import time

import httpx
import pytest

from tests.waiting import until

pytestmark = pytest.mark.e2e


def generate(url, prompt, **parameters):
    body = {"inputs": prompt, "parameters": parameters}
    return httpx.post(f"{url}/generate", json=body, timeout=60)


def stream(url, prompt, **parameters):
    """Yield the decoded events of a stream as they arrive."""
    body = {"inputs": prompt, "parameters": parameters}
    with httpx.stream("POST", f"{url}/generate_stream", json=body, timeout=60) as reply:
        assert reply.status_code == 200
        for line in reply.iter_lines():
            if line.startswith("data:"):
                yield json.loads(line.removeprefix("data:"))


def idle(service):
    return (
        service.metric("tessera_requests_running") == 0
        and service.metric("tessera_requests_waiting") == 0
        and service.metric("tessera_kv_blocks_free") == service.metric("tessera_kv_blocks")
    )


def test_a_function_header_is_completed_with_python(bundled_service):
    prompt = "def fibonacci(n):\n"
    reply = generate(bundled_service.url, prompt, max_new_tokens=48)

    assert reply.status_code == 200
    completion = reply.json()["generated_text"]
    assert completion.startswith("    ")
    # None means valid but incomplete Python; invalid Python raises SyntaxError.
    assert codeop.compile_command(prompt + completion) is None


@pytest.mark.slow
def test_the_service_and_the_plan_command_report_the_same_plan(bundled_service):
    command = [sys.executable, "-m", "server.cli.main", "plan", "--device=cpu", "--json"]
    printed = subprocess.run(command, check=True, capture_output=True).stdout

    plan = httpx.get(f"{bundled_service.url}/plan").json()

    assert plan == json.loads(printed)
    served = httpx.get(f"{bundled_service.url}/info").json()["quantization"]
    by_library = {"int8": ["cpu_step", "cpu_step"], "none": ["torch_prefill", "torch_decode"]}
    assert [phase["kernel"] for phase in plan["phases"]] == by_library[served]
    assert bundled_service.metric("tessera_attention_plan_info") == 1


def test_a_stream_gives_the_same_text_as_a_plain_reply(bundled_service):
    prompt, parameters = "import os\n", {"max_new_tokens": 64, "temperature": 0}
    plain = generate(bundled_service.url, prompt, **parameters).json()["generated_text"]
    events = list(stream(bundled_service.url, prompt, **parameters))

    assert events[-1]["generated_text"] == plain
    assert "".join(e["token"]["text"] for e in events if not e["token"]["special"]) == plain


def test_concurrent_requests_get_the_same_replies_as_single_ones(bundled_service):
    rng = random.Random(1)
    names = ["read", "write", "parse", "merge", "split", "find", "count", "sort"]
    prompts = [f"def {rng.choice(names)}_{i}(data):\n" for i in range(24)]
    parameters = {"max_new_tokens": 40, "temperature": 0}
    with concurrent.futures.ThreadPoolExecutor(24) as pool:
        replies = list(pool.map(lambda p: generate(bundled_service.url, p, **parameters), prompts))

    for prompt, reply in zip(prompts[:6], replies, strict=False):
        assert reply.json() == generate(bundled_service.url, prompt, **parameters).json()
    assert all(reply.status_code == 200 for reply in replies)
    until(lambda: idle(bundled_service))


def test_a_disconnect_frees_the_requests_blocks(bundled_service):
    parameters = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
    events = stream(bundled_service.url, "x = 1\n", **parameters)
    next(events)
    events.close()
    until(lambda: idle(bundled_service))

    with contextlib.suppress(httpx.ReadTimeout):
        httpx.post(
            f"{bundled_service.url}/generate",
            json={"inputs": "y = 2\n", "parameters": parameters},
            timeout=httpx.Timeout(5, read=0.3),
        )
    until(lambda: idle(bundled_service))


@pytest.mark.slow
def test_a_killed_engine_ends_16_streams_with_an_error_and_restarts(start_service):
    service = start_service("--device=cpu")
    service.wait_until_healthy()
    start_seconds = time.monotonic() - service.started
    last, first_tokens = {}, threading.Barrier(17)

    def follow(i):
        parameters = {"max_new_tokens": 1500, "temperature": 0, "ignore_eos": True}
        for n, event in enumerate(stream(service.url, f"a{i} = ", **parameters)):
            if n == 0:
                first_tokens.wait(90)
            last[i] = (time.monotonic(), event)

    with concurrent.futures.ThreadPoolExecutor(16) as pool:
        futures = [pool.submit(follow, i) for i in range(16)]
        first_tokens.wait(90)
        os.kill(service.engine_pid(), signal.SIGKILL)
        killed = time.monotonic()
        for future in futures:
            future.result()

    assert all("error" in event and "error_type" in event for _, event in last.values())
    assert max(when for when, _ in last.values()) - killed < 5.0
    refused = httpx.get(f"{service.url}/health")
    assert refused.status_code == 503
    service.wait_until_healthy(6.0 + 2 * start_seconds)  # a start takes longer on a busy machine
    assert generate(service.url, "import ", max_new_tokens=4).status_code == 200
    assert service.metric("tessera_engine_restarts_total") == 1


def test_health_is_503_with_the_phase_from_the_first_second(start_service):
    service = start_service("--device=cpu")
    seen = set()
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        with contextlib.suppress(httpx.TransportError):
            reply = httpx.get(f"{service.url}/health")
            seen.add(reply.status_code)
            if reply.status_code == 200:
                break
            assert reply.json()["error"]
        time.sleep(0.01)

    assert seen == {200, 503}


def test_a_signal_ends_everything_cleanly(start_service):
    service = start_service("--device=cpu")
    service.wait_until_healthy()
    engine = service.engine_pid()
    log = service.stop()

    assert service.process.returncode in (0, -signal.SIGTERM), log
    assert "Traceback" not in log
    with pytest.raises(ProcessLookupError):
        os.kill(engine, 0)


@pytest.mark.slow
def test_a_flag_overrides_the_environment(start_service):
    service = start_service(
        "--device=cpu",
        "--max-num-seqs=3",
        environment={"TESSERA_MAX_NUM_SEQS": "5", "TESSERA_MAX_MODEL_LEN": "100"},
    )
    service.wait_until_healthy()
    info = httpx.get(f"{service.url}/info").json()

    assert info["max_total_tokens"] == 100
    too_long = generate(service.url, "a b " * 200, max_new_tokens=5)
    assert too_long.status_code == 422
    assert "100" in too_long.json()["error"]


@pytest.mark.slow
def test_random_weights_can_be_served_from_a_config_alone(start_service, tmp_path):
    config = {
        "architectures": ["Qwen3ForCausalLM"],
        "model_type": "qwen3",
        "hidden_act": "silu",
        "hidden_size": 64,
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 16,
        "vocab_size": 5000,
        "max_position_embeddings": 512,
        "rms_norm_eps": 1e-6,
        "rope_theta": 10000.0,
        "tie_word_embeddings": True,
        "torch_dtype": "bfloat16",
    }
    (tmp_path / "config.json").write_text(json.dumps(config))
    service = start_service(f"--model={tmp_path}", "--load-format=dummy", "--device=cpu")
    service.wait_until_healthy()
    parameters = {"max_new_tokens": 20, "ignore_eos": True, "details": True}
    reply = generate(service.url, "import os\n", **parameters)

    assert reply.status_code == 200
    assert reply.json()["details"]["generated_tokens"] == 20

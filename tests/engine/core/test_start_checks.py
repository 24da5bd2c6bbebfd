"""Checks of an engine's configuration before anything is loaded."""

import subprocess
import sys

import pytest

from model.errors import AdapterError
from server.engine.core.messages import EngineConfig
from server.engine.core.start_checks import StartupError, check_start
from tests.model.configs import model_config

MODEL = model_config(
    architecture="LlamaForCausalLM",
    vocab_size=100,
    hidden_size=64,
    intermediate_size=64,
    num_layers=2,
    num_heads=4,
    max_position_embeddings=2048,
)
TOKEN_BYTES = 2 * 2 * 64  # keys and values of both layers, times the bytes of a number


def check(has_gpu=False, model=MODEL, **fields):
    check_start(EngineConfig(model_path="m", model_id="m", **fields), model, has_gpu=has_gpu)


@pytest.fixture
def memory(monkeypatch):
    """Return a function that sets the bytes of this machine's memory."""

    def resize(num_bytes):
        monkeypatch.setattr("server.engine.core.start_checks.total_host_bytes", lambda: num_bytes)

    return resize


def test_a_gpu_that_is_not_there_is_refused_with_the_remedies():
    with pytest.raises(StartupError, match=r"--device cuda: .* --device cpu .* --gpus all"):
        check(device="cuda")


@pytest.mark.parametrize("has_gpu", [True, None])
@pytest.mark.parametrize(
    "fields", [{"device": "cuda"}, {"quantization": "fp8"}, {"kv_cache_gib": 1e6}]
)
def test_a_machine_that_may_have_a_gpu_is_not_refused(fields, has_gpu):
    check(has_gpu, **fields)


def test_slots_for_adapters_that_the_model_cannot_have_are_refused(monkeypatch):
    def find_targets(model):
        raise AdapterError(f"{model.architecture} cannot have adapters: a reason")

    check(max_loras=2)
    monkeypatch.setattr("server.engine.core.start_checks.find_targets", find_targets)
    check()
    with pytest.raises(StartupError, match=r"--max-loras 2: LlamaForCausalLM cannot .* a reason"):
        check(max_loras=2)


def test_a_context_of_the_models_own_limit_is_accepted_and_one_more_is_not():
    check(max_model_len=2048)
    with pytest.raises(StartupError, match=r"--max-model-len 2049 is more than .* 2048 tokens"):
        check(max_model_len=2049)


@pytest.mark.parametrize(("device", "has_gpu"), [("cpu", None), ("cpu", True), ("auto", False)])
def test_weights_in_float8_are_refused_on_a_cpu(device, has_gpu):
    with pytest.raises(StartupError, match=r"--quantization fp8: .* CPU; use --quantization int8"):
        check(has_gpu, device=device, quantization="fp8")


@pytest.mark.parametrize("quantization", ["int8", "int4"])
@pytest.mark.parametrize(("device", "has_gpu"), [("cuda", None), ("cuda", True), ("auto", True)])
def test_integer_weights_are_refused_on_a_gpu(device, has_gpu, quantization):
    words = rf"--quantization {quantization}: .* need --device cpu; on a GPU use --quantization fp8, none"
    with pytest.raises(StartupError, match=words):
        check(has_gpu, device=device, quantization=quantization)


@pytest.mark.parametrize("quantization", ["int8", "int4", "auto", "none"])
@pytest.mark.parametrize(
    ("device", "has_gpu"), [("cpu", True), ("cpu", None), ("auto", False), ("auto", None)]
)
def test_integer_weights_are_accepted_where_the_service_may_run_on_a_cpu(
    device, has_gpu, quantization
):
    check(has_gpu, device=device, quantization=quantization)


@pytest.mark.parametrize(
    ("fields", "value_bytes"),
    [
        ({"quantization": "auto"}, 2),
        ({"quantization": "int4"}, 2),
        ({"quantization": "none"}, 4),
        ({"quantization": "auto", "tensor_parallel": 2}, 4),
        ({"dtype": "float32"}, 4),
        ({"dtype": "bfloat16"}, 2),
        ({"kv_cache_dtype": "fp8"}, 1 + 4 / 16),
    ],
)
def test_a_cache_larger_than_all_memory_in_the_dtype_it_will_have_is_refused(
    memory, fields, value_bytes
):
    size = int(16 * TOKEN_BYTES * value_bytes)
    memory(size)
    check(kv_cache_tokens=16, **fields)
    memory(size - 1)
    with pytest.raises(StartupError, match=r"a KV cache of 16 tokens needs"):
        check(kv_cache_tokens=16, **fields)


def test_a_cache_of_less_than_a_block_is_refused():
    with pytest.raises(StartupError, match=r"--kv-cache-gib 1e-09 is less than one block"):
        check(kv_cache_gib=1e-9)


def test_a_cache_whose_dtype_depends_on_the_processor_is_checked_with_the_smaller_one(memory):
    large = model_config(
        architecture="LlamaForCausalLM", vocab_size=200_000, hidden_size=2048, num_heads=32,
        intermediate_size=8192, num_layers=2, max_position_embeddings=2048, dtype="bfloat16",
    )  # fmt: skip
    size = 16 * 2 * 2 * 2048 * 2

    memory(size)
    check(model=large, kv_cache_tokens=16, quantization="none")
    memory(size - 1)
    with pytest.raises(StartupError, match=r"a KV cache of 16 tokens needs"):
        check(model=large, kv_cache_tokens=16, quantization="none")


def test_the_checks_do_not_import_pytorch():
    code = "import sys, server.engine.core.start_checks; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.mark.parametrize(("device", "has_gpu"), [("cpu", None), ("auto", False), ("cuda", True)])
def test_a_folder_of_compiled_kernels_that_is_not_there_is_refused_on_every_device(
    device, has_gpu, tmp_path
):
    missing, file = tmp_path / "missing", tmp_path / "file"
    file.touch()
    for path in (missing, file):
        with pytest.raises(
            StartupError, match=f"--compiled-kernels {path}: there is no such folder"
        ):
            check(has_gpu, device=device, compiled_kernels=str(path))


def test_a_folder_of_compiled_kernels_that_is_there_is_accepted(tmp_path):
    check(device="cpu", compiled_kernels=str(tmp_path))

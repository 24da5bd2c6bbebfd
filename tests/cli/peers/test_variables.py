"""Environment variables of other servers."""

import sys

import pytest

from server.cli.peers.table import PEERS
from server.cli.peers.unprefixed import UNPREFIXED
from server.cli.peers.variables import PREFIXES, read_variables


def read(model_is_given=False, **variables):
    return read_variables(variables, model_is_given)


def given(**variables):
    return {name: it.text for name, it in read(**variables).given.items()}


def test_variables_of_text_generation_inference_are_settings():
    assert given(
        MODEL_ID="org/name", REVISION="main", NUM_SHARD="2", SHARDED="true", MAX_TOTAL_TOKENS="2048", PORT="80",
        MAX_BATCH_PREFILL_TOKENS="4096", QUANTIZE="fp8", DTYPE="float16", API_KEY="k", JSON_OUTPUT="true",
    ) == {
        "model": "org/name", "revision": "main", "tensor_parallel": "2", "max_model_len": "2048", "port": "80",
        "max_prefill_tokens": "4096", "quantization": "fp8", "dtype": "float16", "api_key": "k", "log_format": "json",
    }  # fmt: skip


def test_variables_of_the_others_are_settings():
    assert given(LLAMA_ARG_MODEL="a", LLAMA_ARG_CTX_SIZE="8", LLAMA_ARG_CACHE_PROMPT="0") == {
        "model": "a", "max_model_len": "8", "enable_prefix_caching": "false",
    }  # fmt: skip
    assert given(VLLM_API_KEY="k", VLLM_LOGGING_LEVEL="DEBUG", VLLM_BATCH_INVARIANT="1") == {
        "api_key": "k", "log_level": "debug", "deterministic": "true",
    }  # fmt: skip


def test_a_revision_is_that_of_the_model_beside_it():
    assert read(REVISION="main").given == {}
    reading = read(model_is_given=True, MODEL_ID="a", REVISION="main")
    assert "revision" not in reading.given
    assert "REVISION has no effect: it belongs to MODEL_ID, which is not used" in reading.notes


@pytest.mark.parametrize(
    "variables",
    [
        {},
        {"HOSTNAME": "pod-7f"},
        {"MODEL_ID": ""},
        {"VLLM_PORT": "tcp://10.0.0.1:8000", "VLLM_SERVICE_HOST": "10.0.0.1"},
        {"VLLM_SERVICE_PORT_HTTP": "1", "VLLM_PORT_8000_TCP_ADDR": "10.0.0.1"},
        {"LLAMA_ARG_PORT": "tcp://10.0.0.1:80", "PROMETHEUS_PORT": "tcp://10.0.0.1:9090"},
        {"MODEL_ID_SERVICE_HOST": "10.0.0.1", "PATH": "/bin", "HF_TOKEN": "x"},
    ],
)
def test_variables_of_shells_and_kubernetes_are_none_of_another_server(variables):
    assert read(**variables) is None


def test_a_key_that_looks_like_an_address_of_kubernetes_is_a_key():
    assert given(VLLM_API_KEY="tcp://a-key") == {"api_key": "tcp://a-key"}


def test_the_name_of_the_machine_is_no_address_and_an_address_there_is_answered():
    reading = read(HOSTNAME="0.0.0.0")  # noqa: S104 - a text

    assert reading.given == {}
    assert "HOSTNAME has no effect: --host is the address to listen on" in reading.notes[0]


def test_a_port_that_is_none_is_of_another_program():
    reading = read(PORT="/dev/ttyUSB0")

    assert reading.given == {}
    assert "PORT has no effect" in reading.notes[0]


def test_the_address_of_ollama_is_not_listened_on():
    reading = read(OLLAMA_HOST="0.0.0.0")  # noqa: S104 - a text

    assert reading.given == {}
    assert "OLLAMA_HOST has no effect: --host and --port" in reading.notes[0]


@pytest.mark.parametrize(
    ("name", "value", "said"),
    [
        ("LLAMA_ARG_SSL_KEY_FILE", "a", "Tessera has no TLS"),
        ("LLAMA_ARG_N_GPU_LAYERS", "20", "LLAMA_ARG_N_GPU_LAYERS 20: Tessera computes all layers"),
        ("CUDA_GRAPHS", "1,2,4", "CUDA_GRAPHS 1,2,4: the sizes of CUDA graphs cannot be chosen"),
    ],
)
def test_a_variable_that_would_change_answers_or_security_is_refused(name, value, said):
    with pytest.raises(ValueError, match="^" + name) as refusal:
        read(**{name: value})
    assert said in str(refusal.value)


@pytest.mark.parametrize(
    "name",
    ["VLLM_ATTENTION_BACKEND", "SGLANG_ANYTHING", "VALIDATION_WORKERS", "VLLM_IMAGE_FETCH_TIMEOUT"],
)
def test_any_other_variable_is_reported_and_has_no_effect(name):
    reading = read(**{name: "1"})

    assert reading.given == {}
    assert reading.notes[0].startswith(f"{name} has no effect: ")


def test_two_variables_that_differ_are_refused():
    with pytest.raises(ValueError, match="LLAMA_ARG_MODEL and MODEL_ID both set --model"):
        read(MODEL_ID="a", LLAMA_ARG_MODEL="b")


def test_the_large_tables_are_not_imported_without_a_variable_of_theirs(monkeypatch):
    for name in ("table", "vllm", "tgi", "sglang", "llama_cpp", "reading"):
        monkeypatch.delitem(sys.modules, f"server.cli.peers.{name}", raising=False)

    assert read(PATH="/bin", HOSTNAME="pod", TESSERA_PORT="1") is None
    assert "server.cli.peers.tgi" not in sys.modules


def test_the_names_without_a_prefix_are_those_of_the_tables():
    names = {name for peer in PEERS for row in peer.rows for name in row.variables.split()}

    assert {name for name in names if not name.startswith(PREFIXES)} == UNPREFIXED

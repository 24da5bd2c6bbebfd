"""Settings from flags and the environment."""

import dataclasses
import json
from typing import Annotated

import huggingface_hub
import pytest
from pydantic import create_model

from model.hub.resolve import resolve
from server.cli import command_settings
from server.cli.command_settings import find_model, read_settings
from server.cli.peers.table import find_variable
from server.cli.settings import Settings, listed_settings, meanings
from server.engine.core.start_checks import StartupError
from server.engine.settings import EngineSettings
from server.http.config import HTTPSettings
from server.setting import Setting


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in list(os.environ):
        if name.upper().startswith("TESSERA_") or find_variable(name):
            monkeypatch.delenv(name)


@pytest.mark.parametrize(
    "arguments",
    [
        ["org/name"],
        ["--model", "org/name"],
        ["--model=org/name", "org/name"],
        ["--port=1", "org/name", "--overlap"],
        ["--no-overlap", "org/name"],
    ],
)
def test_the_model_is_an_argument_or_a_flag(arguments):
    assert read_settings(arguments).model == "org/name"


def test_listed_values_may_be_in_any_case():
    settings = read_settings(["--log-level", "INFO", "--device=CPU", "--dtype", "BFloat16"])

    assert (settings.log_level, settings.device, settings.dtype) == ("info", "cpu", "bfloat16")


def test_two_different_models_are_refused_by_name(refusal):
    message = refusal("gpt2", "--model=org/name")

    assert "'gpt2'" in message
    assert "--model 'org/name'" in message


def test_the_argument_overrides_the_variable(monkeypatch):
    monkeypatch.setenv("TESSERA_MODEL", "org/other")

    assert read_settings(["org/name"]).model == "org/name"


def test_a_flag_overrides_the_variable_and_the_variable_the_default(monkeypatch):
    monkeypatch.setenv("TESSERA_PORT", "9000")
    monkeypatch.setenv("TESSERA_BLOCK_SIZE", "32")
    settings = read_settings(["--port=9001"])

    assert (settings.port, settings.block_size, settings.host) == (9001, 32, "127.0.0.1")
    assert settings.model_fields_set == {"port", "block_size"}


def test_an_empty_variable_counts_as_absent(monkeypatch):
    monkeypatch.setenv("TESSERA_PORT", "")
    monkeypatch.setenv("TESSERA_WHAT", "")

    assert read_settings([]).port == 8000


@pytest.mark.parametrize("value", ["true", "1", "on", "false", "0", "no"])
def test_true_and_false_have_several_names(monkeypatch, value):
    monkeypatch.setenv("TESSERA_OVERLAP", value)

    assert read_settings([]).overlap == (value in ("true", "1", "on"))


def test_an_unknown_variable_is_refused_with_the_most_similar_name(refusal, monkeypatch):
    monkeypatch.setenv("TESSERA_MODLE", "org/name")

    message = refusal()

    assert "TESSERA_MODLE; did you mean TESSERA_MODEL?" in message
    assert "TESSERA_IGNORE_UNKNOWN_ENV=1" in message


def test_every_unknown_variable_has_its_line(refusal, monkeypatch):
    monkeypatch.setenv("TESSERA_MODLE", "x")
    monkeypatch.setenv("TESSERA_XYZZY", "x")

    first, second = refusal().splitlines()

    assert "TESSERA_MODLE" in first
    assert "TESSERA_XYZZY; unset it" in second
    assert second.startswith("tessera serve: error: ")


def test_unknown_variables_can_be_ignored_by_flag_and_by_variable(monkeypatch):
    monkeypatch.setenv("TESSERA_MODLE", "x")

    assert read_settings(["--ignore-unknown-env"]).model == "bundled"
    monkeypatch.setenv("TESSERA_IGNORE_UNKNOWN_ENV", "1")
    assert read_settings([]).model == "bundled"


@pytest.mark.parametrize(
    "name",
    [
        "SERVICE_HOST", "SERVICE_PORT", "SERVICE_PORT_HTTP", "PORT_8000_TCP", "PORT_8000_TCP_ADDR",
        "PORT_8000_TCP_PROTO", "GPU_SERVICE_HOST", "GPU_PORT", "GPU_PORT_8000_TCP_PORT",
    ],
)  # fmt: skip
def test_variables_that_kubernetes_sets_for_a_service_are_no_mistakes(monkeypatch, name):
    monkeypatch.setenv(f"TESSERA_{name}", "tcp://10.0.0.1:8000")

    assert read_settings([]).port == 8000


def test_a_port_that_kubernetes_sets_is_refused_with_the_remedy(refusal, monkeypatch):
    monkeypatch.setenv("TESSERA_PORT", "tcp://10.0.0.1:8000")

    assert "enableServiceLinks" in refusal()


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--port=http", ["--port", "TESSERA_PORT", "'http'", "a whole number from 0 to 65535"]),
        ("--device=gpu", ["--device", "'gpu'", "one of auto, cpu, cuda"]),
        ("--max-model-len=1", ["--max-model-len", "a whole number of at least 2"]),
        ("--overlap=maybe", ["--overlap", "'maybe'", "true or false"]),
        ("--kv-cache-gib=0", ["a finite number greater than 0 and of at most 1048576"]),
    ],
)
def test_a_wrong_value_is_refused_with_what_is_allowed(refusal, argument, words):
    message = refusal(argument)

    for word in words:
        assert word in message


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            ("--max-prefill-tokens=8", "--max-num-seqs=9"),
            ["--max-prefill-tokens 8", "--max-num-seqs 9"],
        ),
        (("--max-num-batched-tokens=8", "--max-num-seqs=9"), ["--max-num-batched-tokens 8", "9"]),
        (
            ("--max-prefill-tokens=16", "--max-num-batched-tokens=32"),
            ["--max-prefill-tokens 16 is less than --max-num-batched-tokens 32"],
        ),
    ],
)
def test_limits_of_a_step_that_contradict_each_other_are_refused(refusal, arguments, words):
    said = refusal(*arguments)

    assert all(word in said for word in words)


def test_every_wrong_value_has_its_line(refusal):
    assert len(refusal("--port=x", "--dtype=x").splitlines()) == 2


def test_every_setting_has_a_description():
    assert meanings().keys() == Settings.model_fields.keys()
    assert all(meanings().values())


def test_every_setting_of_an_engine_and_of_the_http_layer_is_one_of_the_service():
    for record in (EngineSettings, HTTPSettings):
        defaults = {name: Settings.model_fields[name].default for name in record.__annotations__}
        assert Settings().values_of(record) == defaults
        assert defaults == dataclasses.asdict(record())


def test_settings_are_listed_by_subject_and_not_by_record():
    names = list(listed_settings())

    assert sorted(names) == sorted(Settings.model_fields)
    assert names[names.index("api_key") + 1] == "api_key_file"
    assert names[names.index("drain_timeout") + 1 :] == [
        "log_level",
        "ignore_unknown_env",
        "peer_env",
    ]


def test_every_wrong_value_is_described_without_the_words_of_the_validating_library(refusal):
    for field in Settings.model_fields.values():
        kind = command_settings.allowed_values(field)
        if kind:
            name = next(n for n, f in Settings.model_fields.items() if f is field)
            assert kind in refusal(f"--{name.replace('_', '-')}=?!")


def test_the_value_of_a_secret_setting_is_not_shown(refusal, monkeypatch):
    key = Annotated[int, Setting(secret=True)]
    wide = create_model("Wide", __base__=Settings, key=(key, 0))
    for module in ("command_settings", "settings"):
        monkeypatch.setattr(f"server.cli.{module}.Settings", wide)

    message = refusal("--key=hunter2")

    assert "--key (or TESSERA_KEY); it must be a whole number" in message
    assert "hunter2" not in message
    assert "hunter2" not in repr(Settings(api_key=("hunter2",)))


@pytest.mark.parametrize(
    ("arguments", "variable", "names"),
    [
        (["--names=a", "--names=b"], "", ["a", "b"]),
        (["--names=a, b"], "", ["a", "b"]),
        ([], "a, b", ["a", "b"]),
        (["--names=c"], "a,b", ["c"]),
        (["--names="], "", [""]),
    ],
)
def test_a_setting_that_is_a_list_takes_commas_or_repetition(
    monkeypatch, arguments, variable, names
):
    wide = create_model("Wide", __base__=Settings, names=(list[str], []))
    for module in ("command_settings", "settings"):
        monkeypatch.setattr(f"server.cli.{module}.Settings", wide)
    monkeypatch.setenv("TESSERA_NAMES", variable)

    assert read_settings(arguments).names == names


@pytest.mark.parametrize(
    "arguments",
    [
        ["--served-model-name", "a", "b", "--port", "1"],
        ["--port=1", "--served_model_name", "a", "b"],
        ["--port=1", "--served-model-name", "a", "--served-model-name", "b"],
        ["org/name", "--served-model-name", "a", "b", "--port=1"],
        ["--served-model-name", "a", "b", "--port=1", "org/name"],
        ["--served-model-name", "a", "b", "--port=1", "--", "org/name"],
        ["--served-model-name", "a", "b", "--port=1", "--model", "org/name"],
        ["--served-model-name", "a", "b", "--port=1", "-m", "org/name"],
    ],
)
def test_all_words_after_the_flag_of_a_list_are_its_values_as_in_vllm(arguments):
    settings = read_settings(arguments)

    assert settings.served_model_name == ("a", "b")
    assert settings.port == 1
    assert settings.model == ("org/name" if "org/name" in arguments else "bundled")


def test_with_a_model_elsewhere_a_value_of_a_list_may_look_like_one():
    settings = read_settings(["org/name", "--served-model-name", "a", "org/name"])

    assert settings.served_model_name == ("a", "org/name")


@pytest.mark.parametrize("word", ["org/name", "./folder", "gpt2", "Qwen3-0.6B", "bundled"])
def test_a_last_value_that_may_be_the_model_is_refused(refusal, word):
    message = refusal("--served-model-name", "a", word, "--port=1")

    assert f"--served-model-name: '{word}' may be one of its 2 values or the model" in message
    assert message.count("\n") == 1


def test_a_folder_may_be_the_model(refusal, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "mine").mkdir()

    assert "'mine' may be one of its 2 values or the model" in refusal(
        "--served-model-name", "a", "mine"
    )


def test_a_key_that_may_be_the_model_is_not_shown(refusal):
    message = refusal("--api-key", "k", "hunter/2")

    assert "--api-key: the last word after it may be one of its 2 values or the model" in message
    assert "hunter" not in message


@pytest.mark.parametrize("flag", ["--cors-allow-origin", "--allowed-origins"])
def test_words_without_the_form_of_a_lists_values_are_none_of_them(flag):
    both = read_settings([flag, "https://a.b", "https://c.d", "--port=1"])
    one = read_settings([flag, "https://a.b", "org/name"])

    assert both.cors_allow_origin == ("https://a.b", "https://c.d")
    assert (one.cors_allow_origin, one.model) == (("https://a.b",), "org/name")


def test_the_log_says_that_words_after_a_list_are_no_model(capsys):
    read_settings(["--api-key", "k1", "k2"])

    logged = capsys.readouterr().err
    assert "--api-key has 2 values, all words after it, as in vLLM; no model is among" in logged
    assert "k2" not in logged


@pytest.mark.parametrize(
    ("arguments", "variables", "limit"),
    [
        (["-c", "8192", "-np", "4"], {}, 2048),
        (["-c", "16k", "-np", "4"], {}, 4000),
        (["-c", "8192"], {"LLAMA_ARG_N_PARALLEL": "4"}, 2048),
        (["-np", "4"], {"LLAMA_ARG_CTX_SIZE": "8192"}, 2048),
        ([], {"LLAMA_ARG_CTX_SIZE": "8192", "LLAMA_ARG_N_PARALLEL": "4"}, 2048),
        (["-c", "8192", "-kvu"], {"LLAMA_ARG_N_PARALLEL": "4"}, 8192),
        (["-c", "8192", "-np", "4"], {"LLAMA_ARG_KV_UNIFIED": "1"}, 8192),
        (["-c", "8192", "--max-num-seqs", "2"], {"LLAMA_ARG_N_PARALLEL": "4"}, 8192),
        (["--max-model-len", "8192", "-np", "4"], {"LLAMA_ARG_CTX_SIZE": "4096"}, 8192),
    ],
)
def test_the_slots_of_llama_cpp_divide_its_context_wherever_both_are_given(
    monkeypatch, arguments, variables, limit
):
    for name, value in variables.items():
        monkeypatch.setenv(name, value)

    assert read_settings(arguments).max_model_len == limit


def test_the_slots_of_llama_cpp_in_the_file_divide_its_context_too(config):
    assert read_settings(["--config", config("c: 8192\nnp: 4")]).max_model_len == 2048
    assert read_settings(["--config", config("np: 4"), "-c", "4096"]).max_model_len == 1024


@pytest.mark.parametrize("share", ["0", "-0.1", "1.01", "90", "90%", "nan", "inf"])
def test_a_share_of_a_gpus_memory_that_is_none_is_refused(refusal, share):
    message = refusal(f"--gpu-memory-utilization={share}")

    assert "--gpu-memory-utilization (or TESSERA_GPU_MEMORY_UTILIZATION)" in message
    assert "greater than 0 and of at most 1" in message


@pytest.mark.parametrize("size", ["--kv-cache-tokens=64", "--kv-cache-gib=1.5"])
def test_a_share_of_a_gpus_memory_and_a_size_of_the_cache_contradict_each_other(refusal, size):
    message = refusal(size, "--gpu-memory-utilization=0.9")

    assert f"{size.replace('=', ' ')} and --gpu-memory-utilization 0.9 both give" in message
    assert "leave one out" in message


def test_settings_that_contradict_each_other_have_the_names_they_were_given_under(
    refusal, monkeypatch
):
    monkeypatch.setenv("CUDA_MEMORY_FRACTION", "0.5")

    message = refusal("--kv-cache-gib=1")

    assert "--gpu-memory-utilization is given as CUDA_MEMORY_FRACTION" in message
    assert "TESSERA_PEER_ENV=0" in message


def test_settings_are_checked_before_the_weights_are_downloaded(monkeypatch):
    fetched = []

    def fetch(_repository, *, allow_patterns, **_):
        fetched.append(allow_patterns)
        return resolve("bundled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)

    with pytest.raises(StartupError, match="--max-model-len 99999"):
        find_model(read_settings(["org/name", "--max-model-len=99999"]))
    (names,) = fetched
    assert "config.json" in names
    assert all(it.endswith((".json", ".md")) and "*" not in it for it in names)
    assert not any("tokenizer" in it or "index" in it.removeprefix("model_index") for it in names)

    folder, model = find_model(read_settings(["org/name"]))
    assert "*.safetensors" in fetched[-1]
    assert (folder, model.max_context) == (resolve("bundled"), 2048)


@pytest.mark.parametrize(
    "name", ["engine-hang-seconds", "restart-wait", "drain-delay", "drain-timeout"]
)
def test_times_that_other_processes_get_as_json_are_finite(refusal, name):
    assert f"--{name}" in refusal(f"--{name}=inf")


@pytest.fixture
def config(tmp_path):
    """Return a function: write a configuration file and return its path."""

    def write(text):
        file = tmp_path / "service.yaml"
        file.write_text(text)
        return str(file)

    return write


def test_flags_override_variables_these_the_file_and_that_the_variables_of_peers(
    monkeypatch, config
):
    file = config("port: 1\nblock-size: 1\nmax-num-seqs: 1\n")
    for name, value in (
        ("PORT", "9"), ("MAX_BATCH_SIZE", "9"), ("MAX_TOTAL_TOKENS", "9"), ("TESSERA_PORT", "2"),
        ("TESSERA_BLOCK_SIZE", "2"),
    ):  # fmt: skip
        monkeypatch.setenv(name, value)

    settings = read_settings(["--config", file, "--port=3"])

    assert (settings.port, settings.block_size) == (3, 2)
    assert (settings.max_num_seqs, settings.max_model_len) == (1, 9)


def test_the_file_has_a_variable_too(monkeypatch, config):
    monkeypatch.setenv("TESSERA_CONFIG", config("port: 1"))
    assert read_settings([]).port == 1
    assert read_settings(["--config", config("port: 2")]).port == 2


@pytest.mark.parametrize(
    ("text", "said"),
    [
        (
            "\nport: http",
            "service.yaml, line 2: port is 'http'; it must be a whole number from 0 to 65535",
        ),
        ("tp: x", "line 1: tp (--tensor-parallel) is 'x'"),
        ("lora-dtype: x", "line 1: lora-dtype (vLLM): Tessera has no setting of adapters beside"),
        ("cors-allow-origin: x", "line 1: cors-allow-origin is ['x']: 'x' is not an origin"),
    ],
)
def test_a_wrong_value_in_the_file_is_named_with_its_line(refusal, config, text, said):
    assert said in refusal("--config", config(text))


def test_a_wrong_value_has_the_name_it_was_given_under(refusal, monkeypatch):
    assert "--ctx-size (--max-model-len) is 'x'; it must be" in refusal("--ctx-size=x")
    monkeypatch.setenv("NUM_SHARD", "x")
    message = refusal()
    assert "NUM_SHARD (--tensor-parallel) is 'x'" in message
    assert "TESSERA_PEER_ENV=0 ignores variables of other servers" in message


def test_flags_of_other_servers_set_what_they_mean():
    settings = read_settings(["-m", "org/name", "-c", "4096", "--dtype=half", "--max-num-seqs=1K"])

    assert (settings.model, settings.max_model_len) == ("org/name", 4096)
    assert (settings.dtype, settings.max_num_seqs) == ("float16", 1024)


def test_flags_that_contradict_each_other_are_refused(refusal):
    assert "--max-model-len and -c set the same, to '8' and '9'" in refusal(
        "--max-model-len=8", "-c=9"
    )
    assert "two models are given: 'b' and -m 'a'" in refusal("-m", "a", "b")
    assert read_settings(["--max-model-len=4K", "--ctx-size=4096"]).max_model_len == 4096


def test_one_line_says_what_names_of_other_servers_do(monkeypatch, capsys):
    monkeypatch.setenv("MODEL_ID", "org/other")
    monkeypatch.setenv("MAX_TOTAL_TOKENS", "64")
    monkeypatch.setenv("MAX_INPUT_TOKENS", "32")
    monkeypatch.setenv("API_KEY", "hunter2")

    settings = read_settings(["org/name", "--jinja", "--log-format=json"])

    assert (settings.model, settings.max_model_len) == ("org/name", 64)
    flags, variables = map(json.loads, capsys.readouterr().err.splitlines())
    assert "--jinja has no effect" in flags["message"]
    for said in (
        "MODEL_ID has no effect: --model is given", "MAX_TOTAL_TOKENS is --max-model-len 64",
        "MAX_INPUT_TOKENS has no effect: --max-model-len limits", "API_KEY is --api-key",
    ):  # fmt: skip
        assert said in variables["message"]
    assert "hunter2" not in str(variables)


def test_a_start_without_names_of_other_servers_logs_nothing(capsys):
    read_settings(["--port=1"])
    assert capsys.readouterr().err == ""


def test_variables_of_other_servers_can_be_ignored(monkeypatch, config):
    monkeypatch.setenv("MODEL_ID", "org/other")
    monkeypatch.setenv("LORA_ADAPTERS", "x")

    assert read_settings(["--no-peer-env"]).model == "bundled"
    assert read_settings(["--config", config("peer-env: false")]).model == "bundled"
    monkeypatch.setenv("TESSERA_PEER_ENV", "0")
    assert read_settings([]).model == "bundled"

"""Settings from flags and the environment."""

import dataclasses
from typing import Annotated

import huggingface_hub
import pytest
from pydantic import create_model

from model.checkpoint.hub import resolve
from server.cli import command_settings
from server.cli.command_settings import find_model, read_settings
from server.cli.settings import Settings, listed_settings, meanings
from server.engine.core.start_checks import StartupError
from server.engine.settings import EngineSettings
from server.http.config import HTTPSettings
from server.setting import Setting


@pytest.fixture(autouse=True)
def no_variables(monkeypatch):
    import os

    for name in [name for name in os.environ if name.upper().startswith("TESSERA_")]:
        monkeypatch.delenv(name)


@pytest.fixture
def refusal(capsys):
    """Return a function: read arguments that are refused with status 2; return the message."""

    def read(*arguments):
        with pytest.raises(SystemExit) as end:
            read_settings(arguments)
        assert end.value.code == 2
        return capsys.readouterr().err

    return read


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
    assert names[names.index("drain_timeout") + 1 :] == ["log_level", "ignore_unknown_env"]


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


def test_settings_are_checked_before_the_weights_are_downloaded(monkeypatch):
    fetched = []

    def fetch(_repository, *, allow_patterns, **_):
        fetched.append(allow_patterns)
        return resolve("bundled")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fetch)

    with pytest.raises(StartupError, match="--max-model-len 99999"):
        find_model(read_settings(["org/name", "--max-model-len=99999"]))
    assert fetched == [["config.json", "generation_config.json"]]

    folder, model = find_model(read_settings(["org/name"]))
    assert "*.safetensors" in fetched[-1]
    assert (folder, model.max_context) == (resolve("bundled"), 2048)


@pytest.mark.parametrize(
    "name", ["engine-hang-seconds", "restart-wait", "drain-delay", "drain-timeout"]
)
def test_times_that_other_processes_get_as_json_are_finite(refusal, name):
    assert f"--{name}" in refusal(f"--{name}=inf")

"""API keys come from flags, the environment and a file, and no message shows them."""

import json

import pytest

from server.cli.command_settings import read_settings
from server.cli.service_parts import api_keys, warn_if_open
from server.cli.settings import restricting
from server.engine.core.start_checks import StartupError
from server.http.edge.key_limits import NO_LIMITS, KeyLimits


def keys(*arguments):
    return tuple(api_keys(read_settings(list(arguments))))


def test_without_a_key_there_are_none():
    assert keys() == ()


def test_keys_come_from_repeated_flags_and_lists(tmp_path):
    assert keys("--api-key", "a", "--api-key", "b,c", "--api-key=a") == ("a", "b", "c")


def test_keys_come_from_the_environment(monkeypatch):
    monkeypatch.setenv("TESSERA_API_KEY", "one, two")

    assert keys() == ("one", "two")
    assert keys("--api-key", "flag") == ("flag",)


def test_keys_come_from_a_file_in_addition(tmp_path):
    file = tmp_path / "keys"
    file.write_text("# team a\nfirst\n\n  second==  \n")

    assert keys("--api-key-file", str(file), "--api-key", "third") == ("third", "first", "second==")


def test_a_key_of_a_file_may_have_limits(tmp_path):
    file = tmp_path / "keys"
    file.write_text(
        "first lowest_priority=-10  longest_timeout_ms=60000\nsecond\nthird manages_adapters=1\n"
    )

    assert api_keys(read_settings(["--api-key-file", str(file), "--api-key", "first"])) == {
        "first": KeyLimits(lowest_priority=-10, longest_timeout_ms=60000),
        "second": NO_LIMITS,
        "third": KeyLimits(manages_adapters=1),
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hidden lowest=1", "'lowest' must be one of lowest_priority, longest_timeout_ms"),
        ("hidden lowest_priority=x", "lowest_priority must be a whole number from -2147483647 to 2147483647. Given: x"),
        ("hidden longest_timeout_ms=0", "longest_timeout_ms must be a whole number from 1 to 86400000. Given: 0"),
        ("hidden manages_adapters=2", "manages_adapters must be a whole number from 0 to 1. Given: 2"),
        ("hidden longest_timeout_ms=1 longest_timeout_ms=2", "longest_timeout_ms is given twice"),
        ("hidden longest_timeout_ms=1\nhidden", "key 1 is given before with other limits"),
    ],
)  # fmt: skip
def test_a_limit_that_is_not_known_is_an_error_that_does_not_show_the_key(tmp_path, line, reason):
    file = tmp_path / "keys"
    file.write_text(f"{line}\n")

    with pytest.raises(StartupError) as error:
        keys("--api-key-file", str(file))
    assert reason in str(error.value)
    assert "hidden" not in str(error.value)


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        ("", "the file has no key"),
        ("# nothing\n", "the file has no key"),
        ("good\nhas space\n", "key 2 is empty or has characters other than visible ASCII"),
        (b"\xff\xfe", "it is not UTF-8"),
        (None, "No such file or directory"),
    ],
)
def test_a_file_without_usable_keys_is_an_error(tmp_path, content, reason):
    file = tmp_path / "keys"
    if content is not None:
        file.write_bytes(content if isinstance(content, bytes) else content.encode())

    with pytest.raises(StartupError, match=reason) as error:
        keys("--api-key-file", str(file))
    assert "space" not in str(error.value)


@pytest.mark.parametrize("key", ["sec ret", "", "secret,,other", "sécret"])
def test_a_key_that_does_not_fit_in_a_header_is_refused_without_showing_it(capsys, key):
    with pytest.raises(SystemExit):
        keys("--api-key", key)

    message = capsys.readouterr().err
    assert "--api-key" in message
    assert "cret" not in message


def test_the_settings_text_does_not_show_the_keys():
    assert "hidden" not in repr(read_settings(["--api-key", "hidden"]))


@pytest.mark.parametrize("origin", ["https://example.com/", "example.com", "https://", "null"])
def test_a_cors_origin_that_no_browser_sends_is_refused(capsys, origin):
    with pytest.raises(SystemExit):
        read_settings(["--cors-allow-origin", origin])

    assert "is not an origin" in capsys.readouterr().err


def test_cors_origins_may_have_ports_and_be_several():
    settings = read_settings(
        ["--cors-allow-origin", "https://a.example:8443,http://localhost:3000"]
    )

    assert settings.cors_allow_origin == ("https://a.example:8443", "http://localhost:3000")


def test_the_access_log_is_switched_by_a_flag_and_its_opposite():
    assert read_settings([]).access_log
    assert not read_settings(["--no-access-log"]).access_log
    assert read_settings(["--access-log"]).access_log


RESTRICTING = ["api-key", "api-key-file", "allowed-hosts", "cors-allow-origin"]
EMPTY = ["", " ", '""', "''", "\n", "\t "]


def variable(name):
    return "TESSERA_" + name.upper().replace("-", "_")


def test_these_are_the_settings_that_keep_others_out():
    assert {name.replace("-", "_") for name in RESTRICTING} == restricting()


@pytest.mark.parametrize("text", EMPTY)
@pytest.mark.parametrize("name", RESTRICTING)
@pytest.mark.parametrize("place", ["flag", "variable", "file"])
def test_an_empty_text_of_a_setting_that_keeps_others_out_is_refused(
    refusal, monkeypatch, tmp_path, place, name, text
):
    arguments = []
    if place == "flag":
        arguments = [f"--{name}={text}"]
    elif place == "variable":
        monkeypatch.setenv(variable(name), text)
    else:
        file = tmp_path / "settings.yaml"
        file.write_text(json.dumps({name: text}))
        arguments = ["--config", str(file)]

    message = refusal(*arguments)

    assert message.count("\n") == 1
    assert "it is empty; leave it out to have none" in message
    assert {"flag": f"--{name}", "variable": variable(name), "file": "line 1"}[place] in message


@pytest.mark.parametrize("value", ["[]", '["", ""]', '["good", ""]', "null", "~", "{}", ""])
@pytest.mark.parametrize("name", ["api-key", "allowed-hosts"])
def test_a_file_without_a_value_for_it_is_refused(refusal, tmp_path, name, value):
    file = tmp_path / "settings.yaml"
    file.write_text(f"{name}: {value}\n")

    assert name in refusal("--config", str(file))


def test_an_empty_variable_is_refused_although_the_file_has_a_key(refusal, monkeypatch, tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text("api-key: long-enough-to-be-one\n")
    monkeypatch.setenv("TESSERA_API_KEY", "")

    assert "TESSERA_API_KEY" in refusal("--config", str(file))


def test_an_empty_variable_has_no_effect_beside_a_flag(monkeypatch):
    monkeypatch.setenv("TESSERA_API_KEY", "")

    assert keys("--api-key", "flag") == ("flag",)


def test_an_empty_name_of_the_configuration_file_is_refused(refusal, monkeypatch):
    monkeypatch.setenv("TESSERA_CONFIG", "")

    assert "configuration file is empty" in refusal()


@pytest.mark.parametrize(
    "name",
    [
        "VLLM_API_KEY",
        "API_KEY",
        "LLAMA_API_KEY",
        "LLAMA_ARG_API_KEY_FILE",
        "LLAMA_ARG_CORS_ORIGINS",
    ],
)
@pytest.mark.parametrize("text", EMPTY)
def test_an_empty_variable_of_another_server_is_refused(refusal, monkeypatch, name, text):
    monkeypatch.setenv(name, text)

    message = refusal()

    assert f"{name} (--" in message
    assert "it is empty" in message
    assert "TESSERA_PEER_ENV=0" in message


def test_an_empty_variable_of_another_server_has_no_effect_where_ours_is_given(monkeypatch):
    monkeypatch.setenv("VLLM_API_KEY", "")
    monkeypatch.setenv("TESSERA_API_KEY", "ours")

    assert keys() == ("ours",)


@pytest.mark.parametrize(
    "key", ["a\x00b", "a\nb", "a\x7fb", "a\u2028b", "\ufeffab", "a b", '"ab"', "'ab'"]
)
@pytest.mark.parametrize("place", ["flag", "file"])
def test_a_key_that_no_client_can_send_is_refused(tmp_path, place, key):
    if place == "flag":
        with pytest.raises(SystemExit):
            keys(f"--api-key={key}")
    elif key not in ("a\nb", "\ufeffab"):  # two keys, and one after the mark of the encoding
        file = tmp_path / "keys"
        file.write_text(f"{key}\n")
        with pytest.raises(StartupError, match="key 1 is"):
            keys("--api-key-file", str(file))


@pytest.mark.parametrize("separator", ["\x0b", "\x0c", "\x1c", "\x85", "\u2028"])
def test_a_control_character_in_a_key_of_a_file_does_not_make_two_keys(tmp_path, separator):
    file = tmp_path / "keys"
    file.write_text(f"first{separator}second\n", encoding="utf-8")

    with pytest.raises(StartupError, match="key 1 is"):
        keys("--api-key-file", str(file))


def test_a_file_may_have_the_mark_of_its_encoding_and_line_ends_of_windows(tmp_path):
    file = tmp_path / "keys"
    file.write_bytes(b"\xef\xbb\xbffirst\r\nsecond\r\n")

    assert keys("--api-key-file", str(file)) == ("first", "second")


def test_a_file_that_is_a_folder_unreadable_or_endless_is_named(tmp_path):
    for path, reason in ((tmp_path, "Is a directory"), ("/dev/zero", "more than 1048576")):
        with pytest.raises(StartupError, match=reason) as error:
            keys("--api-key-file", str(path))
        assert str(path) in str(error.value)


def test_a_file_that_other_users_can_write_is_refused_and_one_that_they_can_read_is_logged(
    tmp_path, caplog
):
    file = tmp_path / "keys"
    file.write_text("a-key-that-is-long-enough\n")
    file.chmod(0o600)
    keys("--api-key-file", str(file))
    assert not caplog.records

    file.chmod(0o644)
    keys("--api-key-file", str(file))
    assert [it.getMessage() for it in caplog.records] == [
        f"--api-key-file {file}: other users of this machine can read it (chmod 600)"
    ]

    file.chmod(0o666)
    with pytest.raises(StartupError, match="other users can write to it"):
        keys("--api-key-file", str(file))


def test_short_keys_are_logged_by_their_numbers(caplog):
    keys("--api-key", "a-key-that-is-long-enough,hidden")

    (record,) = caplog.records
    assert "can be guessed: 2 of 2" in record.getMessage()
    assert "hidden" not in caplog.text


@pytest.mark.parametrize(
    ("address", "is_open"),
    [
        ("127.0.0.1", False), ("127.9.9.9", False), ("::1", False), ("::ffff:127.0.0.1", False),
        (".".join("0000"), True), ("::", True), ("192.0.2.7", True), ("10.0.0.1", True), ("fe80::1%eth0", True),
        ("::ffff:0.0.0.0", True),
    ],
)  # fmt: skip
def test_a_service_without_keys_that_other_machines_reach_is_logged_once(caplog, address, is_open):
    warn_if_open("a-name", address, 8000, ())
    warn_if_open("a-name", address, 8000, ("key",))

    assert len(caplog.records) == is_open
    if is_open:
        assert address in caplog.text
        assert "--host a-name" in caplog.text

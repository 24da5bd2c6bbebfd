"""API keys come from flags, the environment and a file, and no message shows them."""

import pytest

from server.cli.command_settings import read_settings
from server.cli.service_parts import api_keys
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
    file.write_text("first lowest_priority=-10  longest_timeout_ms=60000\nsecond\n")

    assert api_keys(read_settings(["--api-key-file", str(file), "--api-key", "first"])) == {
        "first": KeyLimits(lowest_priority=-10, longest_timeout_ms=60000),
        "second": NO_LIMITS,
    }


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("hidden lowest=1", "'lowest' must be one of lowest_priority, longest_timeout_ms"),
        ("hidden lowest_priority=x", "lowest_priority must be a whole number from -2147483647 to 2147483647. Given: x"),
        ("hidden longest_timeout_ms=0", "longest_timeout_ms must be a whole number from 1 to 86400000. Given: 0"),
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

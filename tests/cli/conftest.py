"""Runs commands in this process, with scripted servers."""

import io

import pytest

from server.cli.command_settings import read_settings
from server.cli.main import main
from tests.cli import fake_server as fake


@pytest.fixture
def tessera(capsys):
    """Return a function: run a command; return its exit status, output and errors."""

    def run(*arguments):
        status = exit_status(arguments)
        captured = capsys.readouterr()
        return status, captured.out, captured.err

    return run


def exit_status(arguments):
    try:
        main(list(arguments))
    except SystemExit as end:
        return end.code
    return 0


@pytest.fixture
def refusal(capsys):
    """Return a function: read arguments that are refused with status 2; return the message."""

    def read(*arguments):
        with pytest.raises(SystemExit) as end:
            read_settings(arguments)
        assert end.value.code == 2
        return capsys.readouterr().err

    return read


@pytest.fixture
def start():
    """Return a function that starts a server with scripts for its paths."""
    with fake.starter() as begin:
        yield begin


@pytest.fixture
def typed(monkeypatch):
    """Return a function that sets what is on standard input, which is not a terminal."""

    def type_in(text):
        monkeypatch.setattr("sys.stdin", io.StringIO(text))

    return type_in


@pytest.fixture(autouse=True)
def no_key(monkeypatch):
    monkeypatch.delenv("TESSERA_API_KEY", raising=False)

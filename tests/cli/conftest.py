"""Runs commands in this process."""

import pytest

from server.cli.main import main


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

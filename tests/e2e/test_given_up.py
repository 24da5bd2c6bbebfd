"""A service that can never answer again ends with a message and a status, so that what runs it starts it anew."""

import os
import signal

import httpx
import pytest

from tests.e2e.conftest import Service

pytestmark = pytest.mark.e2e

# The engine is a fake one, which fails once the file `broken` exists; the second failure is the last.
PROGRAM = """
import sys
from server.cli.command_settings import read_settings
from server.cli.serve import serve
from server.engine.link import child_process
child_process.MOST_FAILURES = 1
fake = f"exec {sys.executable} -P -m tests.engine.link.fake_engine"
serve(read_settings(sys.argv[2:]), ("sh", "-c", f"[ -e broken ] && {fake} fail; {fake} ok"))
"""


@pytest.mark.parametrize("front_ends", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_a_service_whose_engine_cannot_start_again_ends_with_the_reason(tmp_path, front_ends):
    service = Service(
        ["--device=cpu", f"--frontends={front_ends}"],
        {"PYTHONPATH": os.getcwd()},  # noqa: PTH109 - a text
        ("-c", PROGRAM),
        tmp_path,
    )
    try:
        service.wait_until_healthy()
        (tmp_path / "broken").touch()
        os.kill(service.engine_pid(), signal.SIGKILL)

        assert service.process.wait(timeout=100) == 1
    finally:
        service.process.kill()
    *_, last = service.log().strip().splitlines()
    assert last == (
        "tessera serve: error: the engine could not be started again: shard 2 is truncated; the service ends"
    )
    with pytest.raises(httpx.TransportError):
        httpx.get(f"{service.url}/health")

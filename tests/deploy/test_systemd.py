"""The systemd unit agrees with the service, and systemd accepts it."""

import re
import shutil
import subprocess
from pathlib import Path

import pytest

from server.cli.settings import Settings, environment_variable

UNIT = (Path(__file__).parents[2] / "deploy/systemd/tessera.service").read_text()
ANALYZE = shutil.which("systemd-analyze")
SETTINGS = {environment_variable(name) for name in Settings.model_fields}
needs_systemd = pytest.mark.skipif(ANALYZE is None, reason="systemd-analyze is missing")
# Of 10; systemd calls less than 2 "ok", and most services of distributions have more than 9.
MOST_EXPOSED = 2.0


@pytest.fixture
def installed(tmp_path):
    """The unit, with a command that exists."""
    path = tmp_path / "tessera.service"
    path.write_text(UNIT.replace("/opt/tessera/bin/tessera", "/bin/true"))
    return path


def directive(name):
    return re.search(rf"^{name}=(.*)$", UNIT, re.MULTILINE)[1]


def test_the_unit_sets_only_existing_settings():
    assert set(re.findall(r"TESSERA_\w+", UNIT)) <= SETTINGS


def test_the_service_has_time_to_end_before_it_is_killed():
    drain = float(re.search(r"TESSERA_DRAIN_TIMEOUT=(\d+)", UNIT)[1])

    assert float(directive("TimeoutStopSec")) > drain + 10


def test_wrong_settings_are_not_tried_again():
    assert directive("RestartPreventExitStatus") == "2"


@needs_systemd
def test_systemd_finds_no_mistake(installed):
    done = subprocess.run(
        [ANALYZE, "verify", installed], capture_output=True, text=True, check=False
    )

    assert (done.returncode, done.stdout + done.stderr) == (0, "")


@needs_systemd
def test_the_service_has_few_privileges(installed):
    done = subprocess.run(
        [ANALYZE, "security", "--offline=true", "--no-pager", installed],
        capture_output=True,
        text=True,
        check=False,
    )
    if "unrecognized option" in done.stderr:
        pytest.skip("systemd before 250 cannot judge a file")

    assert float(re.search(r"exposure level.*: ([\d.]+)", done.stdout)[1]) < MOST_EXPOSED

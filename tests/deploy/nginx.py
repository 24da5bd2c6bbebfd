"""Runs nginx with the configuration of deploy/proxy, in front of given ports."""

import contextlib
import os
import shutil
import socket
import subprocess
import time
from pathlib import Path

import pytest

from tests.waiting import GIVE_UP

CONFIG = Path(__file__).parents[2] / "deploy/proxy/tessera.conf"
NGINX = shutil.which("nginx") or shutil.which("nginx", path="/usr/sbin")
OPENSSL = shutil.which("openssl")
needs_nginx = pytest.mark.skipif(not (NGINX and OPENSSL), reason="nginx or openssl is missing")
_PATHS = ("client_body", "proxy", "fastcgi", "uwsgi", "scgi")


def free_port():
    """Return a port that is free now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextlib.contextmanager
def run_nginx(folder, ports):
    """Run the proxy in front of services on these two ports; the value is its URL.

    Args:
        folder: for its files; empty.
        ports: of the services.
    """
    port, key, certificate = free_port(), folder / "key", folder / "certificate"
    options = "-x509 -newkey ec -pkeyopt ec_paramgen_curve:P-256 -nodes -subj /CN=localhost -days 2"
    subprocess.run(
        [OPENSSL, "req", *options.split(), "-keyout", key, "-out", certificate],
        check=True,
        capture_output=True,
    )
    text = CONFIG.read_text()
    for old, new in (
        ("127.0.0.1:8001", f"127.0.0.1:{ports[0]}"),
        ("127.0.0.1:8002", f"127.0.0.1:{ports[1]}"),
        ("listen 443 ssl;", f"listen 127.0.0.1:{port} ssl;"),
        ("/etc/nginx/tessera.crt", str(certificate)),
        ("/etc/nginx/tessera.key", str(key)),
    ):
        assert old in text, old
        text = text.replace(old, new)
    temporary = "".join(f"{name}_temp_path {folder / name};\n" for name in _PATHS)
    user = "user root root;\n" if os.getuid() == 0 else ""
    (folder / "nginx.conf").write_text(
        f"{user}daemon off;\npid {folder / 'pid'};\nerror_log {folder / 'error.log'} info;\n"
        f"events {{}}\nhttp {{\naccess_log off;\n{temporary}{text}}}\n"
    )
    process = subprocess.Popen(
        [NGINX, "-p", folder, "-c", folder / "nginx.conf", "-e", folder / "error.log"]
    )
    try:
        _wait_until_open(port, process, folder)
        yield f"https://127.0.0.1:{port}"
    finally:
        process.terminate()
        process.wait(GIVE_UP)


def _wait_until_open(port, process, folder):
    deadline = time.monotonic() + 20
    while time.monotonic() < deadline and process.poll() is None:
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.02)
    raise AssertionError((folder / "error.log").read_text())

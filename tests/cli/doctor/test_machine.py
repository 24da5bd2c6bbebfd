"""The facts that `tessera doctor` collects on this machine, and the command itself."""

import json
import socket
import stat
import sys
from pathlib import Path

import pytest

from server.cli.doctor.machine import compiler_problem, read_folder
from server.cli.nvidia import Driver, read_driver


def test_the_command_prints_one_line_per_check_and_finds_a_port_in_use(tessera):
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, out, err = tessera("doctor", "--device=cpu", f"--port={port}")

    lines = {line.split()[1]: line for line in out.splitlines()}
    assert (status, err) == (1, "")
    assert lines["port"].startswith(f"error    port             cannot listen on 127.0.0.1:{port}")
    assert lines["driver"].startswith("ok ")


def test_the_command_prints_json(tessera):
    status, out, _ = tessera("doctor", "--device=cpu", "--port=0", "--json")

    report = json.loads(out)
    assert report["ok"] is (status == 0)
    assert {"software", "models", "port", "memory"} <= {it["name"] for it in report["checks"]}


def test_a_folder_is_measured_without_links(tmp_path):
    (tmp_path / "a" / "b").mkdir(parents=True)
    (tmp_path / "a" / "b" / "file").write_bytes(bytes(1000))
    (tmp_path / "link").symlink_to(tmp_path / "a" / "b" / "file")

    folder = read_folder(tmp_path)

    assert (folder.used_bytes, folder.problem) == (1000, "")
    assert folder.free_bytes > 0


def test_an_absent_folder_is_judged_by_the_one_that_exists(tmp_path):
    folder = read_folder(tmp_path / "new" / "folder")

    assert (folder.used_bytes, folder.problem) == (0, "")
    assert not (tmp_path / "new").exists()


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_a_folder_that_cannot_be_written_says_why():
    assert "cannot be written" in read_folder(Path("/proc/self")).problem


def test_a_compiler_that_fails_is_quoted(tmp_path):
    compiler = tmp_path / "cc"
    compiler.write_text("#!/bin/sh\necho 'Python.h: No such file' >&2\nexit 1\n")
    compiler.chmod(compiler.stat().st_mode | stat.S_IXUSR)

    assert compiler_problem(str(compiler)) == f"{compiler}: Python.h: No such file"
    assert "No such file" in compiler_problem(str(tmp_path / "absent"))


def test_the_driver_is_described_without_its_library(tmp_path):
    (tmp_path / "nvidia0").touch()
    file = tmp_path / "version"
    file.write_text("NVRM version: NVIDIA UNIX x86_64 Kernel Module  550.54.15  Tue Mar  5\n")

    assert read_driver(tmp_path, "libabsent.so.1", file) == Driver(True, None, "550.54.15")
    assert read_driver(tmp_path / "x", "libabsent.so.1", tmp_path / "x") == Driver(False)

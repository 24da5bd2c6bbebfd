"""A service that cannot start exits with a status and one clear line; an interrupted start leaves nothing behind."""

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import pytest

from model.hub.resolve import resolve
from server.engine.link.spawn import spawn
from tests.waiting import GIVE_UP, until

pytestmark = pytest.mark.e2e


def serve(*arguments):
    """Run `tessera serve` until it ends; return its exit status and the last line of its log."""
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", *arguments],
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert "Traceback" not in done.stderr
    return done.returncode, done.stderr.strip().splitlines()[-1]


@pytest.fixture
def checkpoint(tmp_path):
    """A copy of the bundled model for a test to damage."""
    return shutil.copytree(resolve("bundled"), tmp_path / "broken")


def test_a_port_in_use_is_named():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        status, line = serve(f"--port={port}")

    assert status == 1
    assert f"cannot listen on 127.0.0.1:{port}" in line


def test_a_port_bound_with_address_reuse_is_still_in_use():
    with socket.socket() as taken:
        taken.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        status, line = serve(f"--port={taken.getsockname()[1]}")

    assert status == 1
    assert "cannot listen" in line


def test_an_invalid_host_name_is_named():
    status, line = serve("--host=a..b", "--port=0")

    assert status == 1
    assert "a..b" in line


def test_a_signal_while_starting_leaves_nothing_behind(tmp_path):
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "serve", "--port=0", "--device=cpu"],
        env=os.environ | {"TMPDIR": str(tmp_path)},
        stderr=subprocess.DEVNULL,
    ) as process:
        until(lambda: len(processes_of(str(tmp_path))) > 1)  # as soon as there is a child
        process.terminate()
        process.wait(timeout=GIVE_UP)

    wait_until_gone(str(tmp_path))
    assert not list(tmp_path.iterdir())


def processes_of(mark):
    """Return the ids of running processes whose environment contains `mark`."""
    found = []
    for folder in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):
            if mark.encode() in (folder / "environ").read_bytes():
                found.append(int(folder.name))
    return found


def wait_until_gone(mark):
    deadline = time.monotonic() + 60  # a process first completes the import it is in
    while processes_of(mark) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert not processes_of(mark)


@pytest.fixture
def interrupts_are_not_ignored():
    """Make child processes handle SIGINT: a shell's background jobs, and their children, ignore it."""
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL, signal.SIGINT])
@pytest.mark.usefixtures("interrupts_are_not_ignored")
def test_a_signal_before_the_settings_are_read_leaves_no_engine_process(number):
    mark = f"MARK={uuid.uuid4()}"
    with subprocess.Popen(
        [sys.executable, "-m", "server.cli.main", "serve", "--port=0", "--device=cpu"],
        env=os.environ | dict([mark.split("=")]),
        stderr=subprocess.DEVNULL,
    ) as process:
        try:
            while len(processes_of(mark)) < 2:
                assert process.poll() is None
            process.send_signal(number)
            process.wait(timeout=GIVE_UP)
        finally:
            process.kill()

    wait_until_gone(mark)


def test_a_wrong_setting_leaves_no_engine_process():
    mark = f"MARK={uuid.uuid4()}"
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", "--port=70000"],
        env=os.environ | dict([mark.split("=")]),
        stderr=subprocess.DEVNULL,
        timeout=60,
        check=False,
    )

    assert done.returncode == 2
    wait_until_gone(mark)


def test_an_engine_process_without_a_configuration_ends_silently(capfd):
    with spawn() as process:
        process.stdin.close()

        assert process.wait(timeout=GIVE_UP) == 0
    assert capfd.readouterr() == ("", "")


def test_the_engine_process_is_spawned_before_slow_imports():
    slow = {"pydantic", "asyncio", "logging", "argparse"}
    code = (
        f"import sys, server.cli.main, server.engine.link.spawn; print({slow} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)

    assert done.stdout == "set()\n"


def test_a_folder_without_weights_is_named(checkpoint):
    for shard in checkpoint.glob("*.safetensors*"):
        shard.unlink()
    status, line = serve(f"--model={checkpoint}", "--port=0")

    assert status == 1
    assert str(checkpoint) in line
    assert "safetensors" in line


@pytest.mark.slow
def test_a_truncated_shard_is_named(checkpoint):
    shard = max(checkpoint.glob("*.safetensors"), key=lambda path: path.stat().st_size)
    shard.write_bytes(shard.read_bytes()[:-1000])
    status, line = serve(f"--model={checkpoint}", "--port=0", "--device=cpu")

    assert status == 1
    assert shard.name in line


def test_a_missing_tokenizer_is_named(checkpoint):
    (checkpoint / "tokenizer.json").unlink()
    status, line = serve(f"--model={checkpoint}", "--port=0", "--device=cpu")

    assert status == 1
    assert "tokenizer.json" in line


def test_an_unsupported_architecture_is_refused_by_name_and_supported_ones_are_listed(checkpoint):
    config = json.loads((checkpoint / "config.json").read_text())
    config["architectures"] = ["MambaForCausalLM"]
    config["model_type"] = "mamba"
    (checkpoint / "config.json").write_text(json.dumps(config))
    status, line = serve(f"--model={checkpoint}", "--port=0")

    assert status == 1
    assert "Mamba" in line or "mamba" in line
    assert "LlamaForCausalLM" in line


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("--port=70000", ["--port", "TESSERA_PORT", "70000", "65535"]),
        ("--max-num-seqs=-1", ["--max-num-seqs", "-1", "1"]),
        ("--dtype=float8", ["--dtype", "float8", "bfloat16"]),
        ("--kv-cache-gib=-1", ["--kv-cache-gib", "TESSERA_KV_CACHE_GIB", "-1", "greater than 0"]),
        ("--kv-cache-gib=nan", ["--kv-cache-gib", "finite"]),
        ("--kv-cache-gib=1e308", ["--kv-cache-gib", "1e308", "1048576"]),
        ("--kv-cache-tokens=0", ["--kv-cache-tokens", "0", "1"]),
        ("--kv-cache-dtype=int8", ["--kv-cache-dtype", "TESSERA_KV_CACHE_DTYPE", "int8", "fp8"]),
        (
            "--max-num-batched-tokens=8 --max-num-seqs=9",
            ["--max-num-batched-tokens", "8", "--max-num-seqs", "9"],
        ),
    ],
)
def test_a_wrong_setting_is_named_with_its_limit(arguments, words):
    status, line = serve(*arguments.split())

    assert status == 2
    for word in words:
        assert word in line


def test_a_context_longer_than_the_models_own_is_refused_with_both_numbers():
    status, line = serve("--max-model-len=1000000", "--port=0", "--device=cpu")

    assert status == 1
    assert "1000000" in line
    assert "own limit of" in line


def test_two_sizes_of_the_kv_cache_are_refused():
    status, line = serve("--kv-cache-tokens=64", "--kv-cache-gib=1")

    assert status == 2
    for word in ("--kv-cache-tokens 64", "--kv-cache-gib 1", "leave one out"):
        assert word in line


@pytest.mark.parametrize(
    ("argument", "words"),
    [
        ("--kv-cache-tokens=10000000000", ["10000000000 tokens", "MiB can be used"]),
        ("--kv-cache-gib=1000000", ["1e+06 GiB", "MiB can be used"]),
        ("--kv-cache-gib=1e-9", ["--kv-cache-gib 1e-09", "one block"]),
    ],
)
def test_an_impossible_kv_cache_size_is_refused_with_both_sizes(argument, words):
    status, line = serve(argument, "--port=0", "--device=cpu")

    assert status == 1
    for word in words:
        assert word in line


def test_help_explains_every_setting():
    done = subprocess.run(
        [sys.executable, "-m", "server.cli.main", "serve", "--help"],
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    for name in ("--model", "--kv-cache-tokens", "--block-size", "--log-level"):
        assert name in done.stdout

"""Socket folders of killed services are removed by the next one; those of live services are not."""

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from server.engine.link.socket_folder import SocketFolder, remove_abandoned

HOLDER = """
import sys, tempfile
from server.engine.link.socket_folder import SocketFolder
tempfile.tempdir = sys.argv[1]
print(SocketFolder().path, flush=True)
sys.stdin.read()
"""


@pytest.fixture(autouse=True)
def temporary_folder(monkeypatch, tmp_path):
    monkeypatch.setattr("tempfile.tempdir", str(tmp_path))
    return tmp_path


def test_only_the_folder_of_a_killed_service_is_removed(tmp_path):
    (tmp_path / "tessera-notes").mkdir()  # of somebody else
    (tmp_path / "tessera-file").touch()
    (tmp_path / "tessera-link").symlink_to(tmp_path)
    (tmp_path / "lock").touch()
    own = SocketFolder()
    with subprocess.Popen(
        [sys.executable, "-c", HOLDER, str(tmp_path)],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    ) as other:
        name = Path(other.stdout.readline().strip()).name
        remove_abandoned()
        kept = {path.name for path in tmp_path.iterdir()}
        other.send_signal(signal.SIGKILL)
    remove_abandoned()

    assert name in kept
    assert {path.name for path in tmp_path.iterdir()} == kept - {name}
    assert own.path.name in kept
    own.remove()


def test_the_folder_is_private_and_removed_once(tmp_path):
    folder = SocketFolder()
    assert folder.path.stat().st_mode & 0o777 == 0o700

    folder.remove()
    folder.remove()

    assert list(tmp_path.iterdir()) == []


def test_a_folder_without_space_for_its_lock_is_not_left_behind(tmp_path, monkeypatch):
    def full(*_, **__):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("tempfile.mkstemp", full)
    with pytest.raises(OSError, match="No space"):
        SocketFolder()

    assert list(tmp_path.iterdir()) == []

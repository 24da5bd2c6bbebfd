"""Downloads from a stand-in for the Hub, in this process and in processes that are interrupted."""

import hashlib
import json
import logging
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
from huggingface_hub import constants

import model.hub.file_download
from model.errors import ModelFolderError
from model.hub.download import download
from model.hub.resolve import resolve
from tests.model.hub.hub_server import COMMIT, Faults, StandIn

REPOSITORY = "acme/tiny"
SHARD = "model-00001-of-00002.safetensors"
CONTENT = bytes(range(256)) * 1200
FILES = {
    "config.json": json.dumps({"model_type": "llama"}).encode(),
    SHARD: CONTENT,
    "model-00002-of-00002.safetensors": CONTENT[::-1],
    "pytorch_model.bin": b"never fetched",
}
PARTS = ["*.json", "*.safetensors"]


@pytest.fixture
def hub(tmp_path, monkeypatch):
    with StandIn(REPOSITORY, FILES) as hub:
        monkeypatch.setattr(constants, "ENDPOINT", hub.url)
        template = hub.url + "/{repo_id}/resolve/{revision}/{filename}"
        monkeypatch.setattr(constants, "HUGGINGFACE_CO_URL_TEMPLATE", template)
        monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
        monkeypatch.setattr(model.hub.file_download, "_FIRST_WAIT_SECONDS", 0.01)
        yield hub


def fetch(revision=None, wanted=PARTS):
    return download(REPOSITORY, revision, wanted, [])


PICKLES = {
    "config.json": FILES["config.json"],
    "pytorch_model-00001-of-00001.bin": CONTENT,
    "pytorch_model.bin.index.json": b"{}",
    "optimizer.bin": b"never fetched",
    "onnx/pytorch_model.bin": b"never fetched",
}


def test_a_repository_of_pickle_files_is_fetched_only_with_the_flag(hub):
    hub.files = PICKLES

    with pytest.raises(
        ModelFolderError, match=r"pickle only \(pytorch_model-00001.*\);.*--load-format pickle"
    ):
        resolve(REPOSITORY, pickle=False)
    assert not hub.fetched(".bin")

    folder = resolve(REPOSITORY, pickle=True)
    assert {it.name for it in folder.iterdir()} == {
        "config.json", "pytorch_model-00001-of-00001.bin", "pytorch_model.bin.index.json",
    }  # fmt: skip
    assert resolve(REPOSITORY, pickle=True) == folder
    assert not hub.fetched("optimizer.bin")


def test_pickle_files_beside_safetensors_files_are_not_fetched_with_the_flag(hub):
    folder = resolve(REPOSITORY, pickle=True)

    assert (folder / SHARD).exists()
    assert not (folder / "pytorch_model.bin").exists()
    assert not hub.fetched("pytorch_model.bin")


def test_a_repository_without_any_weights_is_fetched_as_it_is(hub):
    hub.files = {"config.json": FILES["config.json"]}

    assert [it.name for it in resolve(REPOSITORY, pickle=True).iterdir()] == ["config.json"]


def partial(tmp_path, content):
    """Put the beginning of a shard where an interrupted download leaves it."""
    etag = hashlib.sha256(CONTENT).hexdigest()
    path = tmp_path / "hub" / "models--acme--tiny" / "blobs" / f"{etag}.incomplete"
    path.parent.mkdir(parents=True)
    path.write_bytes(content)
    return path


def test_wanted_files_are_in_the_folder_of_the_commit(hub):
    folder = fetch()

    assert folder.name == COMMIT
    assert {it.name: it.read_bytes() for it in folder.iterdir()} == {
        name: content for name, content in FILES.items() if name != "pytorch_model.bin"
    }


def test_a_second_download_fetches_nothing_and_leaves_the_folder_to_no_library_call(hub):
    folder = fetch()
    hub.requests.clear()

    assert fetch() == folder
    assert [path for _, path, _ in hub.requests if "/resolve/" in path or "/content/" in path] == []


def test_a_broken_connection_is_continued_where_it_ended(hub, caplog):
    hub.faults.breaks = [100_000]
    caplog.set_level(logging.INFO)

    folder = fetch(wanted=[SHARD])

    assert (folder / SHARD).read_bytes() == CONTENT
    assert hub.fetched(f"/content/{SHARD}") == ["", "bytes=100000-"]
    assert f"{SHARD}: " in caplog.text
    assert "after 97.7 KiB of 300.0 KiB; trying again" in caplog.text


def test_a_hub_that_sends_whole_files_only_is_read_again_from_the_beginning(hub):
    hub.faults = Faults(breaks=[100_000], ignores_ranges=True)

    assert (fetch(wanted=[SHARD]) / SHARD).read_bytes() == CONTENT


def test_a_connection_that_always_breaks_at_once_is_given_up(hub):
    hub.faults.breaks = [0] * 50

    with pytest.raises(Exception, match=r"peer closed|ended"):
        fetch(wanted=[SHARD])
    assert len(hub.fetched(f"/content/{SHARD}")) == 5


def test_what_an_earlier_process_received_is_not_fetched_again(hub, tmp_path, caplog):
    partial(tmp_path, CONTENT[:200_000])
    caplog.set_level(logging.INFO)

    folder = fetch(wanted=[SHARD])

    assert (folder / SHARD).read_bytes() == CONTENT
    assert hub.fetched(f"/content/{SHARD}") == ["bytes=200000-"]


@pytest.mark.parametrize("size", [len(CONTENT), len(CONTENT) + 5])
def test_a_file_that_was_only_not_moved_is_used_or_fetched_again(hub, tmp_path, size):
    partial(tmp_path, (CONTENT + b"extra")[:size])

    assert (fetch(wanted=[SHARD]) / SHARD).read_bytes() == CONTENT


def test_a_damaged_beginning_is_found_by_its_hash_and_fetched_again(hub, tmp_path, caplog):
    partial(tmp_path, bytes(200_000))

    assert (fetch(wanted=[SHARD]) / SHARD).read_bytes() == CONTENT
    assert hub.fetched(f"/content/{SHARD}") == ["bytes=200000-", ""]
    assert "was damaged; starting again" in caplog.text


def test_content_that_the_hub_sends_with_another_hash_is_refused_and_not_kept(hub, tmp_path):
    hub.faults.etag = hashlib.sha256(b"other").hexdigest()

    with pytest.raises(ModelFolderError, match="another hash than it says"):
        fetch(wanted=[SHARD])
    assert not [*(tmp_path / "hub" / "models--acme--tiny" / "blobs").iterdir()]


def test_too_little_space_is_said_before_anything_is_fetched(hub, monkeypatch):
    class Usage:
        free = 1000

    monkeypatch.setattr("shutil.disk_usage", lambda _: Usage)

    with pytest.raises(
        ModelFolderError, match=r"needs 600.0 KiB of disk space, .* has 1000 B: make"
    ):
        fetch()
    assert hub.fetched("/content/") == []


def test_a_gated_model_names_the_page_with_its_terms(hub):
    hub.faults.refuses = (401, "GatedRepo")

    with pytest.raises(
        ModelFolderError, match=f"is gated: accept its terms at {hub.url}/acme/tiny"
    ):
        resolve(REPOSITORY)


def test_a_revision_that_does_not_exist_is_named(hub):
    with pytest.raises(ModelFolderError, match="at revision 'v9' does not exist"):
        resolve(REPOSITORY, "v9")


@pytest.mark.parametrize("etag", ["../../../outside", "/outside", "..", ".", "a\\b", "x" * 200])
def test_an_etag_that_would_leave_the_cache_is_refused(hub, tmp_path, etag):
    hub.faults.etag = etag.replace("/outside", f"{tmp_path}/outside") if etag[0] == "/" else etag

    with pytest.raises(ModelFolderError, match="is no hash"):
        fetch()
    assert not [it for it in tmp_path.rglob("*") if it.is_file()]


@pytest.mark.parametrize("commit", ["../../../outside", "/etc", "..", ""])
def test_a_commit_that_would_leave_the_cache_is_refused(hub, commit):
    hub.faults.commit = commit

    with pytest.raises(ModelFolderError, match=r"the commit '.*' is no hash"):
        fetch()


def test_the_cache_is_used_if_the_hub_fails_and_that_is_said(hub, caplog):
    folder = fetch()
    hub.faults.refuses_info = (503, "")

    assert fetch() == folder
    assert "the Hub cannot be asked for acme/tiny; its files in the cache are used" in caplog.text


def test_a_cache_with_only_the_configuration_is_no_model(hub):
    fetch(wanted=["config.json"])
    hub.faults.refuses_info = (503, "")

    with pytest.raises(ModelFolderError, match="HfHubHTTPError"):
        resolve(REPOSITORY)


def test_another_process_that_downloads_the_same_is_waited_for(hub):
    hub.faults.bytes_per_second = 1e6
    folders = []
    threads = [threading.Thread(target=lambda: folders.append(fetch())) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert len(folders) == 2
    assert (folders[0] / SHARD).read_bytes() == CONTENT
    assert len(hub.fetched(f"/content/{SHARD}")) == 1


CHILD = """
import signal, sys
signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell in the background ignores it
from model import progress
progress.LINE_SECONDS = 0.2
from server.log import configure_logging
configure_logging("info")
from model.hub.resolve import resolve
try:
    print(resolve("acme/tiny"))
except KeyboardInterrupt:
    sys.exit(130)
"""


def start(hub, home):
    environment = os.environ | {"HF_ENDPOINT": hub.url, "HF_HOME": str(home), "NO_PROXY": "*"}
    return subprocess.Popen(
        [sys.executable, "-c", CHILD],
        cwd=Path(__file__).parents[3],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


@pytest.fixture
def large_hub():
    files = FILES | {SHARD: CONTENT * 8}
    with StandIn(REPOSITORY, files) as hub:
        hub.faults.bytes_per_second = 4e5
        yield hub


def received(home):
    return sum(it.stat().st_size for it in home.rglob("*.incomplete"))


@pytest.mark.parametrize("sent", [signal.SIGINT, signal.SIGKILL])
def test_an_interrupted_download_is_resumed_by_the_next_process(large_hub, tmp_path, sent):
    child = start(large_hub, tmp_path)
    while received(tmp_path) < 300_000 and child.poll() is None:
        time.sleep(0.05)
    child.send_signal(sent)
    _, log = child.communicate()

    assert child.returncode == (130 if sent is signal.SIGINT else -sent)
    assert "Traceback" not in log
    assert ("the next download resumes there" in log) == (sent is signal.SIGINT)

    large_hub.faults.bytes_per_second = None
    child = start(large_hub, tmp_path)
    out, log = child.communicate()

    assert (Path(out.strip()) / SHARD).read_bytes() == CONTENT * 8
    assert "; resumed from " in log
    assert large_hub.fetched(f"/content/{SHARD}")[-1].startswith("bytes=")


def test_a_log_has_lines_with_bytes_total_and_rate_and_none_of_the_libraries(large_hub, tmp_path):
    child = start(large_hub, tmp_path)
    lines = []
    for line in child.stderr:
        lines.append(line.rstrip("\n"))
        if " left" in line:
            break
    large_hub.faults.bytes_per_second = None
    _, log = child.communicate()

    lines += log.splitlines()
    assert all(" tessera.download " in line for line in lines)
    assert "downloading acme/tiny: 2.6 MiB in 3 files" in lines[0]
    assert any(
        "KiB of 2.6 MiB (" in line and "KiB/s, " in line and " left" in line for line in lines
    )
    assert "downloaded acme/tiny in " in lines[-1]
    assert not any("\r" in line for line in lines)


GGUF = {
    "config.json": b"{}",
    "README.md": b"never fetched",
    "x-Q8_0.gguf": b"GGUF" + CONTENT,
    "x-Q4_K_M.gguf": b"GGUF" + CONTENT[::-1],
    "mmproj-x-F16.gguf": b"never fetched",
    "BF16/x-BF16-00001-of-00002.gguf": b"GGUF1",
    "BF16/x-BF16-00002-of-00002.gguf": b"GGUF2",
}


def files_in(folder):
    return {it.relative_to(folder).as_posix() for it in folder.rglob("*") if it.is_file()}


@pytest.mark.parametrize(
    ("name", "first", "fetched"),
    [
        ("acme/tiny:Q4_K_M", "x-Q4_K_M.gguf", {"x-Q4_K_M.gguf"}),
        ("hf.co/acme/tiny:q8_0", "x-Q8_0.gguf", {"x-Q8_0.gguf"}),
        ("acme/tiny:x-Q8_0.gguf", "x-Q8_0.gguf", {"x-Q8_0.gguf"}),
        (
            "acme/tiny:BF16",
            "BF16/x-BF16-00001-of-00002.gguf",
            {"BF16/x-BF16-00001-of-00002.gguf", "BF16/x-BF16-00002-of-00002.gguf"},
        ),
    ],
)
def test_only_the_files_of_a_quantization_are_fetched(hub, monkeypatch, name, first, fetched):
    hub.files = GGUF

    path = resolve(name)

    folder = path.parents[first.count("/")]
    assert path == folder / first
    assert files_in(folder) == fetched
    hub.requests.clear()
    assert resolve(name) == path
    assert not any(hub.fetched(it) for it in GGUF)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    monkeypatch.setattr(
        constants,
        "HUGGINGFACE_CO_URL_TEMPLATE",
        "http://127.0.0.1:9/{repo_id}/{revision}/{filename}",
    )
    assert resolve(name) == path


def test_a_repository_with_several_quantizations_lists_them(hub):
    hub.files = GGUF

    for name in ("acme/tiny", "acme/tiny:Q5_0"):
        with pytest.raises(ModelFolderError) as raised:
            resolve(name)
        assert str(raised.value).endswith(
            ": give acme/tiny:BF16 or acme/tiny:Q4_K_M or acme/tiny:Q8_0"
        )
    assert not any(hub.fetched(name) for name in GGUF)


def test_a_repository_with_one_quantization_needs_no_name_of_it(hub):
    hub.files = {name: GGUF[name] for name in ("config.json", "x-Q8_0.gguf")}

    assert resolve("acme/tiny").name == "x-Q8_0.gguf"
    assert resolve("acme/tiny", config_only=True).name == "x-Q8_0.gguf"


def test_safetensors_come_before_gguf_files_of_the_same_repository(hub):
    hub.files = FILES | {"x-Q8_0.gguf": b"GGUF"}

    assert SHARD in files_in(resolve("acme/tiny"))
    assert "x-Q8_0.gguf" not in files_in(resolve("acme/tiny"))

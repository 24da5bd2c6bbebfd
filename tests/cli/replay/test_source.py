"""The model that a receipt names is used where it is on this machine, and downloaded only if that is allowed."""

import json
from pathlib import Path

import msgspec
import pytest
from huggingface_hub import constants

import model.hub.download
from model.errors import ModelFolderError
from model.hub.cache import commit_of
from server.cli.replay.source import model_settings
from tests.receipts.make import CONDITIONS, make_receipt

COMMIT, OTHER = "0123456789" * 4, "a" * 40
NAME = "org/name"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """Return the folder of the cache, which has one commit of a repository; nothing can be downloaded."""

    def fetch(*_args, **_kwargs):
        raise AssertionError("fetched")

    monkeypatch.setattr(model.hub.download, "download", fetch)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path))
    snapshot = tmp_path / "models--org--name" / "snapshots" / COMMIT
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    return tmp_path


@pytest.mark.parametrize("may_download", [False, True])
def test_a_folder_and_the_bundled_model_need_no_download(tmp_path, may_download):
    for name in ("bundled", str(tmp_path)):
        assert model_settings(name, None, may_download=may_download) == {"model": name}


@pytest.mark.parametrize("revision", [None, COMMIT])
def test_a_repository_in_the_cache_is_read_from_there(cache, revision):
    found = model_settings(NAME, revision, may_download=False)

    folder = cache / "models--org--name" / "snapshots" / COMMIT
    assert found == {"model": str(folder), "revision": None}


@pytest.mark.parametrize(
    ("name", "revision", "text"),
    [
        (NAME, OTHER, f"'org/name' at revision '{OTHER}', which is not on this machine"),
        ("stranger/weights", None, "'stranger/weights' at no revision"),
        (f"{NAME}@branch", None, "at revision 'branch'"),
    ],
)
def test_no_other_repository_is_downloaded(name, revision, text):
    with pytest.raises(ModelFolderError) as error:
        model_settings(name, revision, may_download=False)

    assert text in str(error.value)
    assert "--model" in str(error.value)
    assert "--allow-download" in str(error.value)


def test_a_quantization_in_the_cache_is_its_file(cache):
    snapshot = cache / "models--org--gguf" / "snapshots" / OTHER
    snapshot.mkdir(parents=True)
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf"):
        (snapshot / name).write_bytes(b"GGUF")

    found = model_settings("org/gguf:Q8_0", OTHER, may_download=False)

    assert found == {"model": str(snapshot / "x-Q8_0.gguf"), "revision": None}
    assert commit_of(snapshot / "x-Q8_0.gguf") == OTHER
    assert commit_of(snapshot) == OTHER
    assert commit_of(cache) is None


def test_a_download_that_is_allowed_is_of_the_commit_of_the_receipt():
    found = model_settings("stranger/weights", OTHER, may_download=True)

    assert found == {"model": "stranger/weights", "revision": OTHER}


def test_the_command_names_the_model_and_computes_nothing(tessera, tmp_path):
    conditions = msgspec.structs.replace(CONDITIONS, model="stranger/weights", revision=OTHER)
    receipts = [make_receipt(), msgspec.structs.replace(make_receipt(), conditions=conditions)]
    file = tmp_path / "file"
    file.write_bytes(b"\n".join(map(msgspec.json.encode, receipts)))

    status, out, err = tessera("replay", str(file), "--device=cpu")

    assert (status, out) == (1, "")
    assert f"'stranger/weights' at revision '{OTHER}'" in err


def test_a_revision_that_is_no_commit_is_refused(tessera, tmp_path):
    plain = json.loads(msgspec.json.encode(make_receipt()))
    plain["conditions"]["revision"] = "../../secret"
    file = Path(tmp_path / "file")
    file.write_text(json.dumps(plain))

    status, _, err = tessera("replay", str(file))

    assert status == 2
    assert "conditions.revision must be a commit. Given: '../../secret'" in err

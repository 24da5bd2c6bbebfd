import json
import shutil

import pytest

from model import checkpoint_digest as module
from model.checkpoint_digest import checkpoint_digest, checkpoint_signature
from model.errors import ModelError


@pytest.fixture
def checkpoint(tmp_path):
    folder = tmp_path / "one"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    (folder / "model.safetensors").write_bytes(b"weights")
    return folder


@pytest.fixture
def other(checkpoint):
    return shutil.copytree(checkpoint, checkpoint.with_name("two"))


def test_a_copy_has_the_same_digest_whatever_lies_beside_it(checkpoint, other):
    (other / "README.md").write_text("text")
    (other / "chat_template.jinja").write_text("text")
    (other / "consolidated.safetensors").write_bytes(b"the same in another format")

    assert checkpoint_digest(other) == checkpoint_digest(checkpoint)
    assert checkpoint_digest(checkpoint).startswith("sha256:")


@pytest.mark.parametrize("name", ["config.json", "model.safetensors"])
def test_a_changed_file_changes_the_digest(checkpoint, other, name):
    content = (other / name).read_bytes()
    (other / name).write_bytes(content[:-1] + b"?")

    assert checkpoint_digest(other) != checkpoint_digest(checkpoint)


@pytest.mark.parametrize("name", ["tokenizer.json", "quantize_config.json"])
def test_an_added_file_that_results_depend_on_changes_the_digest(checkpoint, other, name):
    (other / name).write_text("{}")

    assert checkpoint_digest(other) != checkpoint_digest(checkpoint)


def test_bytes_that_move_from_one_shard_to_the_next_change_the_digest(tmp_path):
    digests = []
    for name, parts in {"a": (b"12", b"3"), "b": (b"1", b"23")}.items():
        folder = tmp_path / name
        folder.mkdir()
        files = {f"model-{i}.safetensors": part for i, part in enumerate(parts)}
        index = {"weight_map": {f"t{i}": file for i, file in enumerate(files)}}
        (folder / "model.safetensors.index.json").write_text(json.dumps(index))
        for file, part in files.items():
            (folder / file).write_bytes(part)
        digests.append(checkpoint_digest(folder))

    assert digests[0] != digests[1]


def test_pickles_and_gguf_files_have_digests_too(tmp_path):
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    file = tmp_path / "model-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")

    assert len({checkpoint_digest(tmp_path), checkpoint_digest(file)}) == 2


def test_a_file_is_read_again_only_if_it_has_changed(checkpoint, monkeypatch):
    read = []
    monkeypatch.setattr(
        module.hashlib,
        "file_digest",
        lambda file, kind: read.append(kind) or module.hashlib.sha256(),
    )
    checkpoint_digest(checkpoint)
    checkpoint_digest(checkpoint)
    assert len(read) == 2

    (checkpoint / "config.json").write_text("{ }")
    checkpoint_digest(checkpoint)
    assert len(read) == 3


def test_a_file_that_is_not_what_was_loaded_is_an_error(checkpoint):
    loaded = checkpoint_signature(checkpoint)
    assert checkpoint_digest(checkpoint, loaded)

    for name in ("model.safetensors", "tokenizer.json"):
        (checkpoint / name).write_text("others")
        with pytest.raises(ModelError, match=f"{name} was changed after it was loaded"):
            checkpoint_digest(checkpoint, loaded)
        loaded = checkpoint_signature(checkpoint)


def test_a_folder_without_weights_and_a_link_to_a_secret_are_errors(checkpoint, tmp_path):
    (checkpoint / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="no weights"):
        checkpoint_digest(checkpoint)

    secret = tmp_path / "secret"
    secret.write_text("secret")
    (checkpoint / "model.safetensors").symlink_to(secret)
    with pytest.raises(ModelError, match="not in the model's folder"):
        checkpoint_digest(checkpoint)

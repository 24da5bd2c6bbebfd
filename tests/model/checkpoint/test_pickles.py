"""Weights in pickle files, which are read only where the operator asks for it."""

import json
import logging
import os
import zipfile
from collections import OrderedDict

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import find_shards
from model.checkpoint.weights import load_model
from model.errors import WeightsError
from tests.model.checkpoint.hf_checkpoints import CASES

SINGLE = "pytorch_model.bin"
INDEX = "pytorch_model.bin.index.json"
POINTER = b"version https://git-lfs.github.com/spec/v1\noid sha256:4d7a21\nsize 1234\n"


def load(folder, load_format="pickle"):
    config = ModelConfig.from_folder(folder)
    return load_model(folder, config, torch.float32, "cpu", load_format, pack=False)


def parameters(model):
    return dict(model.named_parameters())


def assert_same(ours, theirs):
    assert parameters(ours).keys() == parameters(theirs).keys()
    for name, value in parameters(theirs).items():
        assert torch.equal(parameters(ours)[name], value), name


def hub_names(state, prefix):
    """Return a state dict as old files of the Hub have it: without the name of the base model."""
    return {name.removeprefix(prefix): tensor for name, tensor in state.items()}


@pytest.fixture
def opt(tmp_path):
    """A folder of an OPT with safetensors, and the state of the model."""
    return tmp_path, CASES["opt"].save(tmp_path).state_dict()


@pytest.fixture
def folder(opt):
    """The folder with pickle alone."""
    path, state = opt
    (path / "model.safetensors").unlink()
    torch.save(state, path / SINGLE)
    return path


@pytest.mark.parametrize("archive", [True, False], ids=["archive", "before 1.6"])
def test_a_pickle_file_has_the_weights_of_safetensors(opt, archive):
    path, state = opt
    expected = load(path, "auto")
    (path / "model.safetensors").unlink()
    torch.save(state, path / SINGLE, _use_new_zipfile_serialization=archive)

    assert_same(load(path), expected)


def test_files_without_the_base_models_name_and_with_masks_are_read(tmp_path):
    state = CASES["gpt2"].save(tmp_path).state_dict()
    expected = load(tmp_path, "auto")
    (tmp_path / "model.safetensors").unlink()
    mask = torch.ones(512, 512).tril().view(1, 1, 512, 512)
    state = OrderedDict(hub_names(state, "transformer.") | {"h.0.attn.bias": mask})
    torch.save(state, tmp_path / SINGLE)

    assert_same(load(tmp_path), expected)


def test_shards_are_read_as_their_index_says(opt):
    path, state = opt
    expected = load(path, "auto")
    (path / "model.safetensors").unlink()
    names = list(state)
    shards = {
        "pytorch_model-00001-of-00002.bin": names[::2],
        "pytorch_model-00002-of-00002.bin": names[1::2],
    }
    for file, its in shards.items():
        torch.save({name: state[name].clone() for name in its}, path / file)
    weight_map = {name: file for file, its in shards.items() for name in its}
    (path / INDEX).write_text(json.dumps({"metadata": {}, "weight_map": weight_map}))

    assert_same(load(path), expected)


def test_parameters_are_tensors_too(opt):
    path, state = opt
    expected = load(path, "auto")
    (path / "model.safetensors").unlink()
    torch.save({name: torch.nn.Parameter(tensor) for name, tensor in state.items()}, path / SINGLE)

    model = load(path)

    assert_same(model, expected)
    assert not any(it.requires_grad for it in model.parameters())


@pytest.mark.parametrize("load_format", ["auto", "safetensors"])
def test_without_the_flag_pickle_is_refused_and_the_flag_named(folder, load_format):
    (folder / SINGLE).write_bytes(b"cposix\nsystem\n(S'false'\ntR.")

    with pytest.raises(
        WeightsError, match=r"pickle only \(pytorch_model\.bin\);.*--load-format pickle"
    ):
        load(folder, load_format)


def test_safetensors_files_are_preferred_and_the_log_says_so(opt, caplog):
    path, _ = opt
    (path / SINGLE).write_bytes(b"never opened")

    with caplog.at_level(logging.INFO):
        load(path)

    assert "--load-format pickle has no effect" in caplog.text


def test_the_log_names_the_pickle_files(folder, caplog):
    load(folder)

    assert [it.message for it in caplog.records if it.levelno == logging.WARNING] == [
        "the weights are read from pickle files, as --load-format says: pytorch_model.bin"
    ]


def test_a_folder_with_neither_names_what_is_read(folder):
    (folder / SINGLE).rename(folder / "consolidated.00.pth")

    with pytest.raises(
        WeightsError,
        match=r"none of model\.safetensors.*pytorch_model\.bin.*it has consolidated\.00\.pth",
    ):
        load(folder)


class Calls:
    """Calls a function when it is unpickled."""

    def __init__(self, function, *arguments):
        self._call = function, arguments

    def __reduce__(self):
        return self._call


@pytest.mark.parametrize("archive", [True, False])
@pytest.mark.parametrize(
    ("value", "named"),
    [
        (lambda path: Calls(os.mkdir, str(path)), r"calls '\w+\.mkdir'"),
        (lambda path: Calls(open, str(path), "w"), r"calls '\w*io\.open'"),
        (lambda path: Calls(eval, f"open({str(path)!r}, 'w')"), r"calls '\w+\.eval'"),
        (lambda path: Calls(getattr, Calls(str, str(path)), "encode"), r"calls '\w+\.getattr'"),
        (lambda _: torch.nn.Linear(2, 2), r"calls 'torch\.nn\.modules\.linear\.Linear'"),
        (lambda _: bytearray(8), r"calls '\w+\.bytearray'"),
        (lambda _: torch.device("cpu"), r"calls 'torch\.device'"),
    ],
    ids=["mkdir", "open", "eval", "getattr", "module", "memory", "device"],
)
def test_code_is_not_run_and_the_call_named(folder, value, named, archive):
    made = folder / "made"
    state = {"model.decoder.embed_tokens.weight": value(made)}
    torch.save(state, folder / SINGLE, _use_new_zipfile_serialization=archive)

    with pytest.raises(WeightsError, match=named) as found:
        load(folder)

    assert not made.exists()
    assert "weights_only" not in str(found.value)
    assert "\n" not in str(found.value)


def _truncated(file):
    os.truncate(file, file.stat().st_size // 2)


def _compressed(file):
    with zipfile.ZipFile(file) as read:
        content = {it.filename: read.read(it) for it in read.infolist()}
    with zipfile.ZipFile(file, "w", zipfile.ZIP_DEFLATED) as written:
        for name, value in content.items():
            written.writestr(name, value)


def _script(file):
    torch.jit.save(torch.jit.trace(torch.nn.Linear(2, 2), torch.ones(1, 2)), file)


def _pickled(value):
    return lambda file: torch.save(value, file)


@pytest.mark.filterwarnings("ignore::DeprecationWarning", "ignore:`torch.jit")
@pytest.mark.parametrize(
    ("damage", "says"),
    [
        (_truncated, "cannot be read"),
        (lambda file: file.write_bytes(b""), "cannot be read as a pickle of tensors: .*exhausted"),
        (lambda file: file.write_bytes(b"<html>not found</html>"), "is a web page, not the file itself"),
        (lambda file: file.write_bytes(POINTER), "is a pointer of Git LFS, not the file itself: run"),
        (lambda file: file.write_bytes(b"\x80\x04\x95"), "cannot be read"),
        (lambda file: file.write_bytes(b"PK\x03\x04 and no archive"), "not a zip file"),
        (_compressed, "is compressed"),
        (_script, "TorchScript archive"),
        (_pickled([torch.ones(2)]), "holds a list, not tensors by name"),
        (_pickled(torch.ones(2)), "holds a Tensor, not tensors by name"),
        (_pickled({3: torch.ones(2)}), "has the key 3"),
        (_pickled({"state_dict": {"w": torch.ones(2)}}), "'state_dict' is a dict, not a tensor"),
        (_pickled({"w": torch.eye(2).to_sparse()}), "_rebuild_sparse_tensor"),
        (_pickled({"w": torch.ones(2, device="meta")}), "_rebuild_meta_tensor"),
        (_pickled({"w": torch.ones(2, dtype=torch.complex64)}), "stored as complex64"),
        (_pickled({"w": torch.ones(2)}), "missing"),
    ],
    ids=[
        "truncated", "empty", "a page", "a pointer", "half a pickle", "no archive", "compressed", "TorchScript",
        "a list", "a tensor", "a number for a name", "a dictionary in it", "sparse", "meta", "complex", "other tensors",
    ],
)  # fmt: skip
def test_what_is_no_checkpoint_is_refused_with_what_it_is(folder, damage, says):
    damage(folder / SINGLE)

    with pytest.raises(WeightsError, match=says) as found:
        load(folder)

    assert str(folder) in str(found.value)


@pytest.mark.parametrize(
    "name",
    [
        "../other.bin",
        "/etc/passwd",
        "sub/weights.bin",
        "weights.safetensors",
        "weights.pkl",
        "a\\b.bin",
    ],
)
def test_an_index_opens_only_pickle_files_of_the_folder(folder, name):
    (folder / SINGLE).unlink()
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": name}}))

    with pytest.raises(WeightsError, match=r"only plain names of \.bin files"):
        load(folder)


def test_an_index_of_safetensors_opens_no_pickle_file(folder):
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": SINGLE}}))

    with pytest.raises(WeightsError, match=r"only plain names of \.safetensors files"):
        load(folder)


def test_a_link_out_of_the_folder_is_not_followed(folder, tmp_path_factory):
    elsewhere = tmp_path_factory.mktemp("outside") / SINGLE
    (folder / SINGLE).rename(elsewhere)
    (folder / SINGLE).symlink_to(elsewhere)

    with pytest.raises(WeightsError, match="not in the model's folder"):
        load(folder)


def test_only_safetensors_files_are_listed_unless_pickle_is_asked_for(folder):
    with pytest.raises(WeightsError, match="pickle only"):
        find_shards(folder)

    assert find_shards(folder, pickle=True) == ([folder / SINGLE], {})

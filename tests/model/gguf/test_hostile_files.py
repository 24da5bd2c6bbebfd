"""GGUF files that are damaged, cut off or made to do harm."""

import contextlib
import os
import struct
import tracemalloc

import gguf
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.errors import ModelError, ModelFolderError, UnsupportedModelError
from model.gguf import reader
from model.gguf.source import Source
from model.text.tokenizer import Tokenizer
from tests.model.gguf.written import add_bytes, write

SMALL = {"hidden_size": 64, "intermediate_size": 64, "head_dim": 32, "num_attention_heads": 2}
MOST_BYTES_FOR_EACH = 40
"""Of memory for each byte of a file, while its metadata become a configuration and a tokenizer."""
CONSTANT_BYTES = 1 << 20
STRING, ARRAY = 8, 9


@pytest.fixture(scope="module")
def valid(tmp_path_factory):
    file = tmp_path_factory.mktemp("gguf") / "model.gguf"
    write(file, "llama", "Q8_0", tokenizer=add_bytes, num_key_value_heads=1, **SMALL)
    return file


def use_all(file):
    """Read everything that a service reads."""
    config = ModelConfig.from_folder(file)
    Tokenizer.from_folder(file, in_process=True)
    load_model(file, config, torch.float32, "cpu", weight_format=config.weight_format)


def test_the_file_that_is_damaged_in_these_tests_is_valid(valid):
    use_all(valid)


@settings(
    max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(
    edits=st.lists(st.tuples(st.floats(0, 1), st.integers(0, 255)), min_size=1, max_size=4),
    words=st.lists(
        st.tuples(st.floats(0, 1), st.sampled_from([0, 1, 255, 2**31, 2**32 - 1, 2**63, 2**64 - 1])),
        max_size=2,
    ),
    cut=st.floats(0.02, 1),
)  # fmt: skip
def test_no_damage_leads_to_another_error_or_to_more_memory(tmp_path, valid, edits, words, cut):
    content = bytearray(valid.read_bytes())
    start = min(it.start for it in reader.read_header(valid).tensors.values())
    for place, value in edits:
        content[int(place * (start - 1))] = value
    for place, value in words:
        struct.pack_into("<Q", content, int(place * (start - 9)), value)
    file = tmp_path / "model.gguf"
    file.write_bytes(content[: int(len(content) * cut) + 1])

    tracemalloc.start()
    try:
        with contextlib.suppress(ModelError):
            use_all(file)
    finally:
        _, peak = tracemalloc.get_traced_memory()
        tracemalloc.stop()
    assert peak < MOST_BYTES_FOR_EACH * len(content) + CONSTANT_BYTES


def text(value):
    data = value.encode() if isinstance(value, str) else value
    return struct.pack("<Q", len(data)) + data


def key(name, kind, content):
    return text(name) + struct.pack("<I", kind) + content


def tensor(name, *shape, kind=0, offset=0):
    sizes = struct.pack(f"<I{len(shape)}Q", len(shape), *shape)
    return text(name) + sizes + struct.pack("<IQ", kind, offset)


def made(keys=(), tensors=(), num_keys=None, num_tensors=None, version=3, data=4096):
    counts = (
        len(tensors) if num_tensors is None else num_tensors,
        len(keys) if num_keys is None else num_keys,
    )
    header = b"GGUF" + struct.pack("<IQQ", version, *counts) + b"".join((*keys, *tensors))
    return header + bytes(-len(header) % 32 + data)


HUGE = 2**64 - 1
CASES = {
    "empty": (b"", "is empty"),
    "another file": (b"PK\x03\x04" + bytes(100), "does not begin with GGUF"),
    "a pointer of Git LFS": (b"version https://git-lfs.github.com/spec/v1\noid x\n", "git lfs pull"),
    "a web page": (b"<!DOCTYPE html>\n<html>", "is a web page, not the file itself"),
    "cut off in the counts": (b"GGUF\x03\0\0\0", "ends within the number of tensors"),
    "version 1": (made(version=1), "has version 1; supported are 2 and 3"),
    "big-endian": (made(version=3 << 24), "is big-endian"),
    "too many keys": (made(num_keys=HUGE), "keys of metadata; at most 10000 are read"),
    "too many tensors": (made(num_tensors=HUGE), "tensors; at most 100000 are read"),
    "more keys than there are": (made(num_keys=9, data=0), "ends within"),
    "a long key": (made([struct.pack("<Q", HUGE)]), "a key of the metadata has 18446744073709551615 bytes"),
    "a long text": (made([key("a", STRING, struct.pack("<Q", 1 << 40))]), "a has 1099511627776 bytes; at most"),
    "a text beyond the end": (made([key("a", STRING, struct.pack("<Q", 1 << 20))]), "ends within a"),
    "a key that is not UTF-8": (made([key(b"\xff", 0, b"\0")]), "is not UTF-8"),
    "a text that is not UTF-8": (made([key("a", STRING, text(b"\xff"))]), "a is not UTF-8"),
    "a key twice": (made([key("a", 0, b"\0")] * 2), "has the key 'a' twice"),
    "an unknown type": (made([key("a", 13, b"\0")]), "a has a value of type 13"),
    "a long array": (made([key("a", ARRAY, struct.pack("<IQ", 4, HUGE))]), "18446744073709551615 elements of a"),
    "many texts": (made([key("a", ARRAY, struct.pack("<IQ", STRING, HUGE))]), "more than the file has room for"),
    "a text of an array beyond the end": (
        made([key("a", ARRAY, struct.pack("<IQQ", STRING, 1, 1 << 60))]), "a text of a ends after the end",
    ),
    "arrays of arrays": (made([key("a", ARRAY, struct.pack("<IQ", ARRAY, 1))]), "an array of type 9"),
    "an alignment of 0": (made([key("general.alignment", 4, bytes(4))]), "general.alignment must be a multiple of 8"),
    "a huge alignment": (
        made([key("general.alignment", 4, struct.pack("<I", 1 << 31))]), "general.alignment must be a multiple of 8",
    ),
    "an alignment that is a text": (made([key("general.alignment", STRING, text("x"))]), "found 'x'"),
    "no dimensions": (made(tensors=[tensor("t")]), "t has 0 dimensions"),
    "five dimensions": (made(tensors=[tensor("t", 1, 1, 1, 1, 1)]), "t has 5 dimensions"),
    "a size of 0": (made(tensors=[tensor("t", 32, 0)]), "not of whole blocks"),
    "half a block": (made(tensors=[tensor("t", 48, kind=8)]), "not of whole blocks of 32"),
    "a huge tensor": (made(tensors=[tensor("t", HUGE, HUGE)]), "is its download complete"),
    "an offset beyond the end": (made(tensors=[tensor("t", 8, offset=HUGE - 31)]), "is its download complete"),
    "an offset between": (made(tensors=[tensor("t", 8, offset=4)]), "no multiple of 32"),
    "tensors that overlap": (
        made(tensors=[tensor("t", 64), tensor("u", 64, offset=32)]), "the tensors t and u overlap",
    ),
    "a tensor twice": (made(tensors=[tensor("t", 8)] * 2), "has the tensor 't' twice"),
    "a type that is not read": (made(tensors=[tensor("t", 256, kind=34)]), "t is stored as TQ1_0, which is not read"),
    "a type that is not known": (made(tensors=[tensor("t", 256, kind=99)]), "t is stored as number 99, which is not"),
    "no architecture": (made(), "general.architecture must be a text, which is missing"),
    "another architecture": (
        made([key("general.architecture", STRING, text("rwkv7"))]), "'rwkv7' is not supported in GGUF files; supported",
    ),
    "an image encoder": (made([key("general.architecture", STRING, text("clip"))]), "the image encoder of a model"),
    "no embedding": (
        made([key("general.architecture", STRING, text("llama"))]), "has no matrix token_embd.weight",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CASES)
def test_what_is_wrong_is_said_in_one_line_that_names_the_file(tmp_path, name):
    content, says = CASES[name]
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    with pytest.raises((ModelFolderError, UnsupportedModelError)) as raised:
        ModelConfig.from_folder(file)

    assert says in str(raised.value)
    assert str(file) in str(raised.value)
    assert len(str(raised.value).splitlines()) == 1


def test_a_header_without_weights_in_it_is_a_mistake_of_the_tensors(tmp_path, valid):
    """As of a file whose configuration has more layers than tensors."""
    content = valid.read_bytes().replace(
        text("llama.block_count") + struct.pack("<II", 4, 2),
        text("llama.block_count") + struct.pack("<II", 4, 100),
    )
    file = tmp_path / "model.gguf"
    file.write_bytes(content)

    with pytest.raises(ModelError, match="882 missing"):
        use_all(file)


def test_long_arrays_are_not_read(tmp_path, valid, monkeypatch):
    monkeypatch.setattr("model.gguf.source.MAX_ELEMENTS", 100)

    with pytest.raises(ModelFolderError, match=r"tokens has 320 elements; at most 100 are read"):
        Tokenizer.from_folder(valid)


def test_links_out_of_the_folder_and_other_files_are_not_opened(tmp_path, valid):
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to(valid)
    os.mkfifo(tmp_path / "folder" / "pipe.gguf")

    with pytest.raises(
        ModelFolderError, match=r"is a link to .* which is not in the model's folder"
    ):
        ModelConfig.from_folder(tmp_path / "folder" / "model.gguf")
    with pytest.raises(ModelFolderError, match="a model is a folder"):
        ModelConfig.from_folder(tmp_path / "folder" / "pipe.gguf")


# Files that were split


def split(folder, valid, count=2):
    """Write the tensors of a file to several, as llama.cpp's gguf-split does."""
    whole = gguf.GGUFReader(valid)
    names = [f"model-{i + 1:05d}-of-{count:05d}.gguf" for i in range(count)]
    for i, name in enumerate(names):
        writer = gguf.GGUFWriter(folder / name, "llama")
        if i == 0:
            for field in whole.fields.values():
                if not field.name.startswith(("GGUF.", "general.architecture")):
                    kind, inner = field.types[0], field.types[1] if len(field.types) > 1 else None
                    writer.add_key_value(field.name, field.contents(), kind, sub_type=inner)
        writer.add_uint16("split.no", i)
        writer.add_uint16("split.count", count)
        writer.add_int32("split.tensors.count", len(whole.tensors))
        for it in whole.tensors[i::count]:
            writer.add_tensor(it.name, it.data, raw_dtype=it.tensor_type)
        writer.write_header_to_file()
        writer.write_kv_data_to_file()
        writer.write_tensors_to_file()
        writer.close()
    return [folder / name for name in names]


def test_the_parts_of_a_model_are_read_together_whichever_is_named(tmp_path, valid):
    files = split(tmp_path, valid, 3)
    whole = load_model(valid, ModelConfig.from_folder(valid), torch.float32, "cpu", pack=False)

    for file in files:
        config = ModelConfig.from_folder(file)
        model = load_model(file, config, torch.float32, "cpu", pack=False)
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter, dict(whole.named_parameters())[name])
        assert Tokenizer.from_folder(file).vocab_size == 320


def test_a_part_that_is_missing_or_of_another_model_is_named(tmp_path, valid):
    first, second, third = split(tmp_path, valid, 3)
    kept = second.read_bytes()
    second.unlink()
    with pytest.raises(ModelFolderError, match=f"is one of 3 files; {second.name} is missing"):
        Source(first)
    second.write_bytes(third.read_bytes())
    with pytest.raises(ModelFolderError, match="has the tensor"):
        Source(first)
    second.write_bytes(made())
    with pytest.raises(ModelFolderError, match=r"split\.tensors\.count is 21"):
        Source(first)
    second.write_bytes(kept)
    alone = tmp_path / "renamed.gguf"
    first.rename(alone)
    with pytest.raises(ModelFolderError, match="is one of 3 files, whose names must be"):
        Source(alone)

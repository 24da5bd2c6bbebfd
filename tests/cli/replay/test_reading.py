import io
import json

import pytest

from server.cli.replay.reading import read_files
from server.receipts.record import ReceiptError
from tests.receipts.make import plain_receipt

A, B = plain_receipt(seed=1), plain_receipt(seed=2)


def seeds(text, monkeypatch, notes=None):
    """Return the seeds of the receipts that a text has."""
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    found = read_files(["-"], (notes if notes is not None else []).append)
    return [it.receipt.sampling.get("seed") for it in found]


def events(*values):
    return "".join(f"event: x\ndata: {json.dumps(it)}\n\n" for it in values)


@pytest.mark.parametrize(
    "text",
    [
        json.dumps(A) + json.dumps(B),
        f"\ufeff{json.dumps(A)}\n\n{json.dumps(B)}\r\n",
        json.dumps(A, indent=2) + "\n" + json.dumps(B, indent=4),
        json.dumps([A, B]),
        json.dumps({"generated_text": "x", "receipt": A}) + json.dumps([{"receipt": B}]),
        ": comment\n\n" + events({"choices": []}, {"choices": [], "receipt": A}, {"receipt": B}) + "data: [DONE]\n\n",
        events({"response": {"id": 1}}, {"response": {"receipt": A}}, {"receipt": B}),
        f"data:{json.dumps({'receipt': A})}\r\n\r\ndata:{json.dumps({'receipt': B})}\r\n\r\n",
    ],
)  # fmt: skip
def test_receipts_are_found_alone_and_within_replies_and_streams(text, monkeypatch):
    notes = []

    assert seeds(text, monkeypatch, notes) == ["1", "2"]
    assert notes == []


def test_replies_without_a_receipt_among_others_are_counted(monkeypatch):
    lines = [{"error": "busy"}, {"receipt": A}, {"receipt": None}]
    notes = []

    assert seeds("\n".join(map(json.dumps, lines)), monkeypatch, notes) == ["1"]
    assert notes == ["standard input: 2 of its JSON values have no receipt, such as that in line 3"]


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "standard input has no receipt; a reply has one if its request has `receipt: true`"),
        ("{}", "has no receipt"),
        ("hello", "line 1 is not JSON: Expecting value at column 1"),
        (json.dumps(A) + "\n" + json.dumps(A)[:60], "line 2 is not JSON"),
        ("[" * 100_000, "line 1 is not JSON: too deep"),
        ("[" * 900 + "]" * 900, "has no receipt"),
        ('{"response": ' * 900 + "1" + "}" * 900, "has no receipt"),
        ("1" * 10_000, "line 1 is not JSON"),
        ('\n\n{"receipt": 3}', "line 3: Expected `object`, got `int`"),
        ('data: {"receipt"\n\n', "line 1 is not JSON"),
        (json.dumps({**A, "version": 7}), "line 1: version must be 1. Given: 7"),
    ],
)
def test_anything_else_is_one_error_with_its_line(text, words, monkeypatch):
    with pytest.raises(ReceiptError) as refused:
        seeds(text, monkeypatch)
    assert words in str(refused.value)


def test_files_are_named_if_there_are_several(tmp_path):
    for name in "ab":
        (tmp_path / name).write_text(json.dumps(A))
    paths = [str(tmp_path / name) for name in "ab"]

    assert [it.name for it in read_files(paths[:1], print)] == ["receipt 1"]
    assert [it.name for it in read_files(paths, print)] == [f"{path}: receipt 1" for path in paths]


@pytest.mark.parametrize("name", ["missing", ".", "\0"])
def test_a_file_that_cannot_be_read_is_an_error(tmp_path, name):
    with pytest.raises(ReceiptError):
        read_files([f"{tmp_path}/{name}"], print)


def test_bytes_that_are_no_text_are_an_error(tmp_path):
    (tmp_path / "a").write_bytes(b"\xff\xfe")
    with pytest.raises(ReceiptError, match="is not a text in UTF-8"):
        read_files([str(tmp_path / "a")], print)

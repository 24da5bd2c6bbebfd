"""The measurement of adapters asks for what it says, with adapters that the model takes."""

import argparse
import itertools

from benchmarks.adapters import decode, loads, measure, write_adapters
from model.checkpoint.config import ModelConfig
from tests.tiny_checkpoint import write_tiny_checkpoint


def options(**changes):
    values = {
        "streams": 4, "slots": 2, "rank": 4, "prompt_tokens": 5, "output_tokens": 3, "requests": 8, "rounds": 2,
        "samples": 3, "quantization": "auto", "threads": 1, "device": "cpu", "dummy": False,
    }  # fmt: skip
    return argparse.Namespace(**values | changes)


def test_an_adapter_of_a_window_is_that_of_as_many_requests_as_a_slot_has_streams():
    found = loads(["a", "b", "c"], options())

    taken = {name: list(itertools.islice(it, 8)) for name, it in found.items()}
    assert taken == {
        "model": [None] * 8,
        "resident": ["a", "b"] * 4,
        "window": ["a", "a", "b", "b", "c", "c", "a", "a"],
        "distinct": ["a", "b", "c", "a", "b", "c", "a", "b"],
    }


def test_each_load_is_measured_with_the_adapters_that_it_needs(tmp_path):
    write_tiny_checkpoint(tmp_path)
    folder = tmp_path / "adapters"
    folder.mkdir()
    adapters = write_adapters(ModelConfig.from_folder(tmp_path), folder, 6, 4)
    assert len({it.digest for it in adapters}) == 6

    rows = {it["load"]: it for it in measure(adapters, 6, options(model=str(tmp_path)))}

    assert [it["requests"] for it in list(rows.values())[:4]] == [16] * 4
    assert rows["resident"]["loads"] == rows["model"]["loads"] == 0
    assert rows["distinct"]["loads"] > 0
    assert rows["distinct"]["reads"] == 0, "all are in host memory"
    assert rows["single"]["bytes"] > 0


def test_decode_steps_are_measured_without_adapters_with_one_and_with_several(tmp_path):
    write_tiny_checkpoint(tmp_path)
    folder = tmp_path / "adapters"
    folder.mkdir()
    adapters = write_adapters(ModelConfig.from_folder(tmp_path), folder, 2, 4)

    rows = decode(adapters, options(model=str(tmp_path), decode=[1, 3]))

    loads_of = [(it["sequences"], it["load"]) for it in rows]
    assert loads_of == [
        (1, "disabled"),
        (3, "disabled"),
        *((count, load) for count in (1, 3) for load in ("model", "one", "each")),
    ]
    assert all(it["step_ms"] > 0 for it in rows)

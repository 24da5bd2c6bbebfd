import stat
from pathlib import Path

import pytest

from benchmarks.cpu_peers import gguf, model_files
from benchmarks.cpu_peers.build import LlamaBuild
from benchmarks.cpu_peers.contenders import Round
from benchmarks.cpu_peers.work import Work


@pytest.fixture
def program(tmp_path):
    """Stand in for `llama-quantize`: it copies its arguments to the file that it is to write."""
    path = tmp_path / "llama-quantize"
    path.write_text('#!/bin/sh\nall="$*"\nwhile [ $# -gt 3 ]; do shift; done\necho "$all" > "$1"\n')
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return LlamaBuild(tmp_path, "1", ())


def shared(model, program, *, same_files):
    return Round(model, Work(), 2, {}, program, same_files=same_files)


def test_other_formats_are_rounded_from_the_file_of_a_package(tmp_path, monkeypatch, program):
    own = tmp_path / "Model-1B.Q4_1.gguf"
    monkeypatch.setattr(model_files, "resolve", lambda _: own)
    round_ = shared("smollm2", program, same_files=True)

    found = model_files.model_files(round_, tmp_path, ["Q4_1", "Q4_K_M"])

    assert found["Q4_1"] == own
    assert found["Q4_K_M"] == tmp_path / "models" / "smollm2-Q4_K_M-mixed.gguf"
    words = found["Q4_K_M"].read_text().split()
    assert words[:2] == ["--allow-requantize", str(own)]
    assert words[-2:] == ["Q4_K_M", "2"]


def test_only_files_beside_a_checkpoint_have_one_format_for_all_matrices(
    tmp_path, monkeypatch, program
):
    monkeypatch.setattr(gguf, "write", lambda path, *_, **__: path.write_text("bfloat16"))

    pure = model_files.model_files(
        shared("qwen3-0.6b", program, same_files=False), tmp_path, ["Q4_0"]
    )
    mixed = model_files.model_files(
        shared("qwen3-0.6b", program, same_files=True), tmp_path, ["Q4_0"]
    )

    assert pure["BF16"] == mixed["BF16"]
    assert "--pure" in pure["Q4_0"].read_text()
    assert "--pure" not in mixed["Q4_0"].read_text()


def test_files_are_made_once(tmp_path, monkeypatch, program):
    monkeypatch.setattr(gguf, "write", lambda path, *_, **__: path.write_text("bfloat16"))
    round_ = shared("qwen3-0.6b", program, same_files=True)
    (file,) = [model_files.model_files(round_, tmp_path, ["Q8_0"])["Q8_0"]]
    file.write_text("kept")

    assert model_files.model_files(round_, tmp_path, ["Q8_0"])["Q8_0"].read_text() == "kept"
    assert not list(file.parent.glob("*.part"))


@pytest.mark.parametrize("name", ["SmolLM2-135M-Instruct.Q4_1.gguf", "model-Q4_1.gguf"])
def test_the_format_of_a_file_is_the_end_of_its_name(name):
    assert model_files.stored_format(Path(name)) == "Q4_1"


def test_tessera_reads_the_file_with_its_own_numbers(tmp_path):
    file = tmp_path / "m.gguf"
    round_ = Round("qwen3-0.6b", Work(), 2, {}, files={"Q8_0": file}, same_files=True)

    assert round_.settings("Q8_0") == [f"--model={file}", "--device=cpu"]

"""The training recipe at small scale: prepare a few library files, train for a few steps, evaluate."""

from __future__ import annotations

import dataclasses
import json
import shutil
import sysconfig
from pathlib import Path

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from model.training import evaluate, prepare, train
from model.training.completion import complete_greedily
from model.training.loop import Shape, Stage, learning_rate, run_stage
from model.training.network import model_logits
from model.training.optimizer import orthogonalize
from model.training.prepare import STREAMS, TEXT_STREAMS, infilling_stream, read_held_out
from model.training.streams import TokenStreams
from model.training.tokenization import FIM_PREFIX, SPECIAL_TOKENS, TURN_END_ID
from model.training.train import export

CPU = torch.device("cpu")
STAGE = Stage(
    name="tiny",
    shape=Shape(64, 2, 1, 1, 128),
    steps=12,
    batch_tokens=512,
    lengths=(64, 128),
    learning_rate=1e-2,
    dropout=0.1,
)


@pytest.fixture(scope="module")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = tmp_path_factory.mktemp("recipe")
    stdlib = Path(sysconfig.get_paths()["stdlib"])
    library = root / "python3"
    for name in ("json", "logging", "wsgiref", "html", "concurrent"):
        shutil.copytree(
            stdlib / name, library / name, ignore=shutil.ignore_patterns("__pycache__", "tests")
        )
    # The recipe also reads a stream of tests, but the standard library's tests may not be installed.
    (library / "test").mkdir()
    shutil.copy(stdlib / "shelve.py", library / "test" / "test_shelve.py")
    output = root / "data"
    sizes = ("--vocab-size", "600", "--held-out-share", "0.1")
    prepare.main(["--stdlib", str(library), "--output", str(output), *sizes])
    return output


def test_training_lowers_the_loss_and_an_interrupted_run_ends_with_the_same_weights(data, tmp_path):
    whole = run_stage(STAGE, data, tmp_path / "a", device=CPU, compiled=False, save_every=4)
    run_stage(STAGE, data, tmp_path / "b", device=CPU, compiled=False, stop_after=5)
    resumed = run_stage(STAGE, data, tmp_path / "b", device=CPU, compiled=False)
    for (name, left), right in zip(whole.named_parameters(), resumed.parameters(), strict=True):
        assert torch.equal(left, right), name
    log = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [4, 8, 12]
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    other = dataclasses.replace(STAGE, seed=1)
    with pytest.raises(ValueError, match="other settings"):
        run_stage(other, data, tmp_path / "b", device=CPU, compiled=False)


def test_a_student_learns_from_a_teacher_and_its_export_gives_the_same_logits(data, tmp_path):
    short = dataclasses.replace(STAGE, steps=2)
    teacher = run_stage(short, data, tmp_path / "t", device=CPU, compiled=False)
    distilled = dataclasses.replace(short, distill_weight=0.8, seed=1)
    student = run_stage(distilled, data, tmp_path / "s", [teacher], device=CPU, compiled=False)
    export(student, data, tmp_path / "out")
    config = ModelConfig.from_folder(tmp_path / "out")
    served = load_model(tmp_path / "out", config, torch.float32, "cpu")
    ids = torch.tensor([[0, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(
            model_logits(served, ids), model_logits(student, ids), atol=0.02, rtol=0.05
        )


def test_the_command_line_trains_teacher_and_student_and_records_the_run(data, tmp_path):
    sizes = {"hidden-size": 64, "num-layers": 1, "num-heads": 1, "num-kv-heads": 1}
    sizes |= {"intermediate-size": 64, "steps": 1, "batch-tokens": 2048}
    flags = [f"--{role}-{k}={v}" for role in ("teacher", "student") for k, v in sizes.items()]
    folders = [f"--data={data}", f"--work={tmp_path / 'work'}", f"--output={tmp_path / 'out'}"]
    train.main([*flags, *folders, "--device=cpu", "--no-compile"])
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["student"]["steps"] == record["teacher"]["steps"] == 1
    assert ModelConfig.from_folder(tmp_path / "out").hidden_size == 64


def test_paged_greedy_completion_equals_recomputing_the_sequence(data, tmp_path):
    model = run_stage(
        dataclasses.replace(STAGE, steps=1), data, tmp_path, device=CPU, compiled=False
    )
    prompts = [[0, 10, 11], [0, 40, 41, 42, 43, 44], [0]]
    for prompt, new in zip(prompts, complete_greedily(model, prompts, 20, end_id=0), strict=True):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 20:
                chosen = int(model_logits(model, torch.tensor([ids]))[0, -1].argmax())
                if chosen == 0:
                    break
                ids.append(chosen)
        assert new == ids[len(prompt) :]


def test_a_batch_is_determined_by_seed_and_step_and_split_tokens_keep_the_text(data):
    streams = TokenStreams(data, CPU, (1.0,) * len(STREAMS))
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))

    def batch(step: int, split: float) -> torch.Tensor:
        return streams.batch(7, step, 8, 100, start_share=0.5, split=split)

    assert batch(3, 0.2).shape == (8, 101)
    assert torch.equal(batch(3, 0.2), batch(3, 0.2))
    assert not torch.equal(batch(3, 0.2), batch(4, 0.2))
    for whole, split in zip(batch(3, 0.0).tolist(), batch(3, 0.2).tolist(), strict=True):
        text = tokenizer.decode(whole, skip_special_tokens=False)
        assert text.startswith(tokenizer.decode(split[:80], skip_special_tokens=False)[:-4])
    assert torch.equal(batch(3, 0.0)[1::2], batch(3, 0.2)[1::2])


def test_rows_for_infilling_replace_the_given_share_of_text_rows(data):
    weights = (1.0,) * len(TEXT_STREAMS) + (0.0,)
    streams = TokenStreams(data, CPU, weights)
    prefix = SPECIAL_TOKENS.index(FIM_PREFIX)

    def share(wanted: float) -> float:
        rows = streams.batch(
            1, 1, 200, 40, start_share=1.0, split=0.1, infilling_share=wanted
        )  # a rearranged document begins with the separator and the token
        return (rows[:, 1] == prefix).float().mean().item()

    assert share(0.0) == 0
    assert 0.4 < share(0.5) < 0.6
    assert share(1.0) > 0.95


def test_a_small_checkpoint_is_measured_on_infilling_and_instructions(data, tmp_path):
    model = run_stage(
        dataclasses.replace(STAGE, steps=1), data, tmp_path, device=CPU, compiled=False
    )
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    held_out = read_held_out(data)
    figures = evaluate.special_figures(model, tokenizer, held_out)

    infilling = figures["infilling"]
    assert infilling["lines"] >= infilling["exact_psm"] >= 0 <= infilling["exact_spm"]
    assert figures["instructions"]["instructions"] >= figures["instructions"]["functions"] >= 0
    assert model.config.eos_token_ids == (0, TURN_END_ID)


def test_every_document_starts_with_the_separator(data):
    with np.load(data / "tokens.npz") as arrays:
        for name in (*STREAMS, *map(infilling_stream, TEXT_STREAMS)):
            assert (arrays[name][arrays[f"{name}_starts"]] == 0).all()
            assert arrays[name][-1] == 0


def test_the_bits_of_a_file_do_not_depend_on_window_boundaries(data, tmp_path):
    model = run_stage(
        dataclasses.replace(STAGE, steps=1), data, tmp_path, device=CPU, compiled=False
    )
    ids = [0, *range(1, 200)]
    with torch.no_grad():
        logits = model_logits(model, torch.tensor([ids[:-1]]))[0].double()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    bits = evaluate.file_bits(model, ids)
    assert bits == pytest.approx(expected.item() / np.log(2), rel=1e-4)
    assert evaluate.file_bits(model, [0] * 5000) > 0
    assert evaluate.function_headers(read_held_out(data))


def test_a_completion_is_cut_at_the_end_of_the_function():
    assert evaluate.cut_function("def f():\n", "    return 1\n\nx = 2\n") == (
        "def f():\n    return 1\n\n"
    )
    assert evaluate.cut_function("def f():\n", "    a = 1\n    b = (2") == "def f():\n    a = 1\n"
    assert evaluate.parses("def f():\n    return 1\n")
    assert not evaluate.parses("def f():\n")


def test_the_learning_rate_rises_linearly_then_falls_to_almost_zero():
    stage = dataclasses.replace(STAGE, steps=100, learning_rate=1.0, warmup_share=0.1)
    rates = [learning_rate(stage, step) for step in range(100)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == rates[9] == 1.0
    assert rates[99] == pytest.approx(1 / 90)


def test_orthogonalized_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 32, 64), (2, 64, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert 0.6 < values.min() <= values.max() < 1.3

"""The training recipe at small scale: prepare a few library files, train for a few steps, evaluate."""

from __future__ import annotations

import dataclasses
import itertools
import json
import shutil
import sysconfig
from pathlib import Path

import msgspec
import numpy as np
import pytest
import torch
from tokenizers import Tokenizer

from model.checkpoint.config import ModelConfig
from model.checkpoint.generation_config import read_sampling_defaults
from model.checkpoint.weights import load_model
from model.sampling.parameters import SamplingParams
from model.training import evaluate, loop, prepare, train
from model.training.completion import complete_prompts
from model.training.loop import Clock, Shape, Stage, learning_rate, run_stage
from model.training.network import model_logits
from model.training.optimizer import orthogonalize
from model.training.prepare import (
    STREAMS,
    TEXT_STREAMS,
    infilling_stream,
    read_arrays,
    read_held_out,
)
from model.training.streams import TokenStreams, pack
from model.training.tokenization import FIM_PREFIX, SPECIAL_TOKENS, TURN_END_ID
from model.training.train import export

CPU = torch.device("cpu")
GREEDY = SamplingParams(max_new_tokens=20, temperature=0.0)
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


def run(stage, data, output, teachers=(), measurements=None, **options):
    if measurements:
        stage = dataclasses.replace(stage, measurements=measurements)
    options = {"device": CPU, "compiled": False} | options
    model, _ = run_stage(stage, data, output, teachers, **options)
    return model


@pytest.mark.slow
def test_training_lowers_the_loss_and_the_same_seed_gives_the_same_weights(data, tmp_path):
    kept = []
    first = run(STAGE, data, tmp_path / "a", measurements=3, keep=kept.append)
    second = run(STAGE, data, tmp_path / "b", measurements=1)
    for (name, left), right in zip(first.named_parameters(), second.parameters(), strict=True):
        assert torch.equal(left, right), name
    log = [json.loads(line) for line in (tmp_path / "a" / "log.jsonl").read_text().splitlines()]
    assert [line["step"] for line in log] == [4, 8, 12]
    assert log[-1]["loss"] < log[0]["loss"] - 0.3
    assert len(kept) == 2


def test_the_best_weights_are_returned_and_not_the_last(data, tmp_path, monkeypatch):
    measured = iter([3.0, 1.0, 2.0])
    seen = []

    def bits(self, model):
        seen.append(model.norm.detach().clone())
        return next(measured)

    monkeypatch.setattr(loop.HeldOut, "bits_per_byte", bits)
    model = run(STAGE, data, tmp_path, measurements=3)
    assert torch.equal(model.norm, seen[1])
    assert not torch.equal(model.norm, seen[2])


def test_a_stage_by_the_clock_ends_in_time_and_leaves_out_the_compilation():
    now = 100.0
    stage = dataclasses.replace(STAGE, steps=0, seconds=60.0)
    clock = Clock(stage, now=lambda: now)
    assert clock.progress(0) == 0
    now = 120.0  # the first step took 20 s
    assert clock.progress(1) == 0
    now = 150.0
    assert clock.progress(2) == pytest.approx(0.5)
    now = 181.0
    assert clock.progress(3) == 1
    assert clock.trained == 61.0
    with pytest.raises(ValueError, match="neither steps nor seconds"):
        Clock(dataclasses.replace(STAGE, steps=0))


def test_the_clock_of_a_further_process_continues_and_leaves_out_its_compilation():
    now = 0.0
    stage = dataclasses.replace(STAGE, steps=0, seconds=60.0)
    clock = Clock(stage, first_step=7, trained=30.0, now=lambda: now)
    assert clock.progress(7) == 0.5
    now = 20.0
    assert clock.progress(8) == 0.5
    now = 35.0
    assert clock.progress(9) == 0.75


@pytest.mark.slow
def test_processes_that_are_ended_early_give_the_model_of_one_that_is_not(data, tmp_path):
    whole = run(STAGE, data, tmp_path / "a", measurements=3)
    parts = None
    for process in range(12):
        parts = run(STAGE, data, tmp_path / "b", measurements=3, deadline=0.0)
        assert (parts is None) == (process < 11)
        assert (tmp_path / "b" / loop.STATE_FILE).exists() == (process < 11)
    for left, right in zip(whole.parameters(), parts.parameters(), strict=True):
        assert torch.equal(left, right)
    logs = [
        [
            {key: value for key, value in json.loads(line).items() if key != "seconds"}
            for line in (tmp_path / name / "log.jsonl").read_text().splitlines()
        ]
        for name in ("a", "b")
    ]
    assert logs[0] == logs[1]


def test_the_state_of_another_run_is_refused_by_what_differs(data, tmp_path):
    assert run(STAGE, data, tmp_path, deadline=0.0) is None
    with pytest.raises(ValueError, match=r"state\.pt is of a run with dropout 0\.1; continue"):
        run(dataclasses.replace(STAGE, dropout=0.2), data, tmp_path)


@pytest.mark.slow
def test_a_student_learns_from_a_teacher_and_its_export_gives_the_same_logits(data, tmp_path):
    short = dataclasses.replace(STAGE, steps=2)
    teacher = run(short, data, tmp_path / "t")
    distilled = dataclasses.replace(short, distill_weight=0.8, seed=1)
    student = run(distilled, data, tmp_path / "s", [teacher])
    export(student, data, tmp_path / "out")
    defaults = read_sampling_defaults(tmp_path / "out")
    assert defaults.repetition_penalty == train.SAMPLING_DEFAULTS["repetition_penalty"]
    config = ModelConfig.from_folder(tmp_path / "out")
    served = load_model(tmp_path / "out", config, torch.float32, "cpu")
    ids = torch.tensor([[0, 5, 6, 7]])
    with torch.no_grad():
        torch.testing.assert_close(
            model_logits(served, ids), model_logits(student, ids), atol=0.02, rtol=0.05
        )


@pytest.mark.slow
def test_the_command_line_trains_in_one_process_or_in_several(data, tmp_path):
    sizes = {"hidden-size": 64, "num-layers": 1, "num-heads": 1, "num-kv-heads": 1}
    sizes |= {"intermediate-size": 64, "steps": 2, "batch-tokens": 2048, "minutes": 0}
    flags = [f"--{role}-{k}={v}" for role in ("teacher", "student") for k, v in sizes.items()]
    folders = [f"--data={data}", f"--work={tmp_path / 'work'}", f"--output={tmp_path / 'out'}"]
    common = [*flags, *folders, "--device=cpu", "--no-compile"]
    train.main(common)
    record = json.loads((tmp_path / "out" / "training.json").read_text())
    assert record["student"]["steps"] == record["teacher"]["steps"] == 2
    assert ModelConfig.from_folder(tmp_path / "out").network.hidden == 64

    def weights() -> bytes:
        return b"".join(file.read_bytes() for file in sorted((tmp_path / "out").glob("*tensors")))

    whole = weights()
    shutil.rmtree(tmp_path / "out")
    shutil.rmtree(tmp_path / "work")
    for _ in range(2):  # after a step of the teacher, and after one of the student
        with pytest.raises(SystemExit) as end:
            train.main([*common, "--minutes=0.001"])
        assert end.value.code == train.UNFINISHED
    train.main([*common, "--minutes=0.001"])
    assert weights() == whole
    assert json.loads((tmp_path / "out" / "training.json").read_text())["seconds"] >= 0
    with pytest.raises(ValueError, match=r"teacher\.pt was trained with other settings"):
        train.main([*common, "--teacher-dropout=0.5"])


def test_paged_greedy_completion_equals_recomputing_the_sequence(data, tmp_path):
    model = run(dataclasses.replace(STAGE, steps=1), data, tmp_path)
    prompts = [[0, 10, 11], [0, 40, 41, 42, 43, 44], [0]]
    for prompt, new in zip(
        prompts, complete_prompts(model, prompts, GREEDY, end_id=0), strict=True
    ):
        ids = list(prompt)
        with torch.no_grad():
            while len(ids) < len(prompt) + 20:
                chosen = int(model_logits(model, torch.tensor([ids]))[0, -1].argmax())
                if chosen == 0:
                    break
                ids.append(chosen)
        assert new == ids[len(prompt) :]


def test_completions_are_sampled_as_by_the_service_and_depend_on_their_own_seed(data, tmp_path):
    model = run(dataclasses.replace(STAGE, steps=1), data, tmp_path)
    sampled = SamplingParams(max_new_tokens=8, temperature=1.0, seed=5)
    first, second = complete_prompts(model, [[0, 10], [0, 10]], sampled, end_id=-1)
    assert first != second
    again = msgspec.structs.replace(sampled, seed=6)
    assert complete_prompts(model, [[0, 10]], again, end_id=-1) == [second]
    penalized = msgspec.structs.replace(GREEDY, repetition_penalty=100.0, max_new_tokens=30)
    (tokens,) = complete_prompts(model, [[0, 10]], penalized, end_id=-1)
    assert len(set(tokens)) == 30


def documents(batch) -> list[list[int]]:
    """Return the inputs of each document and the last target."""
    starts = batch.cu_seqlens.tolist()
    pairs = itertools.pairwise(starts)
    return [[*batch.inputs[a:b].tolist(), int(batch.targets[b - 1])] for a, b in pairs if b > a]


def test_a_batch_is_packed_documents_without_padding(data):
    streams = TokenStreams(data, (1.0,) * len(STREAMS))
    options = {"lengths": (64, 128), "start_share": 0.5, "split": 0.1, "infilling_share": 0.5}
    batch = streams.batch(7, 3, 4096, **options)
    assert len(batch.inputs) == len(batch.targets) == len(batch.positions) == 4096
    assert batch.cu_seqlens[0] == 0
    assert batch.cu_seqlens[-1] == 4096
    assert all(
        torch.equal(a, b) for a, b in zip(batch, streams.batch(7, 3, 4096, **options), strict=True)
    )
    assert not torch.equal(batch.inputs, streams.batch(7, 4, 4096, **options).inputs)
    found = documents(batch)
    assert len(found) > 20
    positions = [place for ids in found for place in range(len(ids) - 1)]
    assert batch.positions.tolist() == positions
    assert [token for ids in found for token in ids[1:]] == batch.targets.tolist()


def test_split_tokens_keep_the_text(data):
    streams = TokenStreams(data, (1.0, 0.0, 0.0, 0.0, 0.0))
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))

    def texts(split: float) -> list[str]:
        batch = streams.batch(7, 3, 4096, lengths=(100,), start_share=0.5, split=split)
        return [tokenizer.decode(ids, skip_special_tokens=False) for ids in documents(batch)]

    pairs = list(zip(texts(0.0), texts(0.3), strict=False))
    # The last document of the batch is cut.
    assert all(whole == split for whole, split in pairs[:-1])
    assert len(texts(0.3)) < len(texts(0.0))


def test_no_token_sees_another_document(data, tmp_path):
    model = run(dataclasses.replace(STAGE, steps=1), data, tmp_path)
    first, second = [0, 10, 11, 12], [0, 40, 41, 42, 43, 44, 45]
    owner = np.repeat([0, 1], [len(first), len(second)])
    batch = pack(np.array(first + second), owner, len(first) + len(second) - 2)
    with torch.no_grad():
        together = model.packed_logits(batch)
        alone = [model_logits(model, torch.tensor([ids[:-1]]))[0] for ids in (first, second)]
    torch.testing.assert_close(together, torch.cat(alone), atol=1e-5, rtol=1e-4)
    with pytest.raises(ValueError, match="9 inputs, 10 needed"):
        pack(np.array(first + second), owner, 10)


def test_documents_for_infilling_replace_the_given_share_of_text(data):
    streams = TokenStreams(data, (1.0,) * len(TEXT_STREAMS) + (0.0,))
    prefix = SPECIAL_TOKENS.index(FIM_PREFIX)

    def share(wanted: float) -> float:
        batch = streams.batch(
            1, 1, 20_000, lengths=(400,), start_share=1.0, split=0.0, infilling_share=wanted
        )
        # A rearranged document begins with the separator and the token.
        found = documents(batch)
        return sum(len(ids) - 1 for ids in found if ids[:2] == [0, prefix]) / 20_000

    assert share(0.0) == 0
    assert 0.35 < share(0.5) < 0.65
    assert share(1.0) > 0.8


def test_a_small_checkpoint_is_measured_on_infilling_and_instructions(data, tmp_path):
    model = run(dataclasses.replace(STAGE, steps=1), data, tmp_path)
    tokenizer = Tokenizer.from_file(str(data / "tokenizer.json"))
    held_out = read_held_out(data)
    figures = evaluate.special_figures(model, tokenizer, held_out)

    infilling = figures["infilling"]
    assert infilling["lines"] >= infilling["exact_psm"] >= 0 <= infilling["exact_spm"]
    assert figures["instructions"]["instructions"] >= figures["instructions"]["functions"] >= 0
    assert model.config.eos_token_ids == (0, TURN_END_ID)


def test_every_document_starts_with_the_separator(data):
    arrays = read_arrays(data)
    for name in (*STREAMS, *map(infilling_stream, TEXT_STREAMS)):
        assert (arrays[name][arrays[f"{name}_starts"]] == 0).all()
        assert arrays[name][-1] == 0


def test_the_bits_of_a_file_do_not_depend_on_window_boundaries(data, tmp_path):
    model = run(dataclasses.replace(STAGE, steps=1), data, tmp_path)
    ids = [0, *range(1, 200)]
    with torch.no_grad():
        logits = model_logits(model, torch.tensor([ids[:-1]]))[0].double()
    expected = torch.nn.functional.cross_entropy(logits, torch.tensor(ids[1:]), reduction="sum")
    bits = evaluate.file_bits(model, ids)
    assert bits == pytest.approx(expected.item() / np.log(2), rel=1e-4)
    assert evaluate.file_bits(model, [0] * 5000) > 0
    assert evaluate.function_headers(read_held_out(data))


def test_a_loop_is_three_equal_periods_at_the_end():
    assert evaluate.is_loop([9, 1, 2, 1, 2, 1, 2])
    assert evaluate.is_loop([5, 5, 5])
    assert not evaluate.is_loop([1, 2, 1, 2, 1, 2, 3])
    assert not evaluate.is_loop([1, 2, 1, 2])
    assert not evaluate.is_loop([])


def test_a_completion_is_cut_at_the_end_of_the_function():
    assert evaluate.cut_function("def f():\n", "    return 1\n\nx = 2\n") == (
        "def f():\n    return 1\n\n"
    )
    assert evaluate.cut_function("def f():\n", "    a = 1\n    b = (2") == "def f():\n    a = 1\n"
    assert evaluate.parses("def f():\n    return 1\n")
    assert not evaluate.parses("def f():\n")


def test_the_learning_rate_rises_linearly_then_falls_to_zero():
    stage = dataclasses.replace(STAGE, learning_rate=1.0, warmup_share=0.1)
    assert learning_rate(stage, 0.0) == pytest.approx(0.01)
    assert learning_rate(stage, 0.05) == pytest.approx(0.5)
    assert learning_rate(stage, 0.1) == 1.0
    assert learning_rate(stage, 0.55) == pytest.approx(0.5)
    assert learning_rate(stage, 1.0) == 0.0


def test_orthogonalized_matrices_have_singular_values_near_one():
    torch.manual_seed(0)
    for shape in ((2, 32, 64), (2, 64, 32)):
        values = torch.linalg.svdvals(orthogonalize(torch.randn(shape)))
        assert 0.6 < values.min() <= values.max() < 1.3

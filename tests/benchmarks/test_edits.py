"""The edits are what they say, and the benchmark of drafts notices every difference."""

import ast
import json
import platform
import random
import sysconfig
from collections import Counter
from pathlib import Path

import pytest

from benchmarks.edits.__main__ import parse
from benchmarks.edits.cases import Model, random_cases
from benchmarks.edits.data import COUNT, KINDS, SEED, changes_between, make_edits, parts, read_edits
from benchmarks.edits.rounds import ReplayedTokens, Rounds, Run, differences, row
from model.checkpoint.config import ModelConfig
from model.hub.resolve import BUNDLED, resolve
from server.engine.core.request import TokenEvent
from tests.engine.runner.test_engine_model import make_engine
from tests.tiny_checkpoint import write_tiny_checkpoint

EDITS = read_edits()
HELD_OUT = json.loads((resolve(BUNDLED) / "evaluation.json").read_text())["data"]["held_out"]
SAMPLE = """\
class Reader:
    def read(self, size):
        return self.file.read(size)

    def read_all(self):
        data = self.read(-1)
        return data
"""


def test_the_edits_are_of_each_kind_a_third_and_of_held_out_files():
    kinds = Counter(edit.kind for edit in EDITS)

    assert len(EDITS) == COUNT == 100
    assert {*kinds} == {*KINDS}
    assert max(kinds.values()) - min(kinds.values()) <= 1
    assert {edit.path for edit in EDITS} <= {*HELD_OUT["paths"]}
    assert len({edit.text for edit in EDITS}) == COUNT


@pytest.mark.parametrize("kind", KINDS)
def test_an_edit_is_another_program_with_few_other_lines(kind):
    for edit in EDITS:
        if edit.kind == kind:
            assert ast.dump(ast.parse(edit.text)) != ast.dump(ast.parse(edit.edited))
            assert changes_between(edit.text, edit.edited) == edit.changes
            changed = sum(len(new) for _, _, new in edit.changes)
            assert 1 <= changed < edit.text.count("\n") / 3, edit


@pytest.mark.parametrize(
    ("kind", "instruction", "line"),
    [
        ("rename", "rename the function read to ", "data = self.handle_read(-1)"),
        ("docstring", "add the docstring ", '"""Read'),
        ("argument", "insert the argument ", "def read(self, size, "),
    ],
)
def test_a_function_is_edited_as_the_instruction_says(kind, instruction, line):
    found = [it for seed in range(20) for it in KINDS[kind](SAMPLE, random.Random(seed))]

    edited = [text for given, text in found if given.startswith(instruction)]
    assert any(line in text for text in edited)
    assert all(ast.parse(text) for text in edited)


def test_the_parts_of_a_file_are_runs_of_whole_statements():
    found = [*parts(f"import os\n\n{SAMPLE}\n\ndef last():\n    pass\n")]

    assert SAMPLE in found
    assert (
        "class Reader:\n    def read_all(self):\n        data = self.read(-1)\n        return data\n"
        in found
    )
    assert all(ast.parse(part) for part in found)


@pytest.mark.slow
@pytest.mark.skipif(
    platform.python_version() != "3.11.7",
    reason="other versions have other files than CPython 3.11.7",
)
def test_the_script_makes_the_file_again_bit_by_bit():
    folder = Path(sysconfig.get_paths()["stdlib"])

    assert make_edits(folder, HELD_OUT["paths"], COUNT, SEED) == EDITS


def test_all_edits_fit_into_the_context_of_the_bundled_model():
    model = Model(resolve(BUNDLED))
    cases = model.edits()

    assert len(cases) == COUNT
    # The prompt ends where the answer goes on: the rest of the edited part.
    for edit, case in zip(EDITS[:10], cases, strict=False):
        prompt = model.tokenizer.decode(case.prompt, skip_special_tokens=False)
        begun = prompt.split(f"# after: {edit.instruction}\n")[1]
        assert edit.edited.startswith(begun)
        assert begun.count("\n") >= edit.changes[0][0]


@pytest.fixture(scope="module")
def tiny(tmp_path_factory):
    return write_tiny_checkpoint(
        tmp_path_factory.mktemp("tiny"), intermediate_size=128, head_dim=32
    )


@pytest.mark.parametrize("right", [1.0, 0.0])
def test_replayed_drafts_are_right_as_often_as_asked(tiny, right):
    engine = make_engine(tiny, dtype="auto", quantization="int8")
    for kind in engine.drafts.kinds:
        kind.costs.note = lambda *_: None
        kind.costs.seconds = lambda _: 1.0
    cases = random_cases(engine.engine.info.vocab_size, prompt=10, tokens=24, count=3)
    rounds = Rounds(engine, ModelConfig.from_folder(tiny), cases, streams=2)
    _, answers = rounds.run(drafts=False)
    tokens = {i: [it.token_id for it in events] for i, events in answers.items()}
    engine.drafts.drafter = ReplayedTokens(tokens, right, engine.engine.info.vocab_size)

    found = rounds.compare(1)

    assert found["different"] == []
    assert found["acceptance"] == right
    assert found["tokens"] == 3 * 24
    assert (found["steps_with"] < found["steps_without"] / 2) == bool(right)


def test_a_token_a_log_probability_and_an_end_that_differ_are_found():
    events = [TokenEvent(token_id=i, logprob=-1.0) for i in range(3)]
    changes = [
        [*events[:1], TokenEvent(token_id=9, logprob=-1.0), events[2]],
        [*events[:2], TokenEvent(token_id=2, logprob=-1.0000000000000002)],
        events[:2],
    ]

    found = differences(dict.fromkeys(range(4), events), {0: events, **dict(enumerate(changes, 1))})

    assert [text.split("token ")[1] for _, text in sorted(found.items())] == [
        "1 of 3", "2 of 3", "2 of 3",
    ]  # fmt: skip


def test_the_figures_of_a_row_are_those_of_all_its_runs():
    without = [Run(2.0, 100, 100, decode_seconds=1.5), Run(4.0, 100, 100, decode_seconds=3.0)]
    with_ = [Run(1.0, 100, 40, 0.75, 80, 60), Run(1.0, 100, 40, 0.75, 80, 60)]

    found = row(without, with_, {})

    assert found["speed_up"] == 3.0
    assert found["decode_speed_up"] == 3.0
    assert found["speed_ups"] == [2.0, 4.0]
    assert found["accepted_per_step"] == 1.5
    assert found["acceptance"] == 0.75


@pytest.mark.parametrize("wrong", [["--workloads", "replay"], ["--max-draft-tokens", "2"]])
def test_what_a_service_cannot_do_is_an_error(wrong, capsys):
    with pytest.raises(SystemExit):
        parse(["--http", *wrong])
    assert "--http" in capsys.readouterr().err

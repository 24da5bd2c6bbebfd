"""The model card: figures of both decodings, and a comparison with the model before if there was one."""

from __future__ import annotations

import copy
import json
from pathlib import Path

import pytest

import model
from model.training import card

FOLDER = Path(model.__file__).parent / "bundled"


@pytest.fixture
def records():
    names = ("config.json", "evaluation.json", "training.json")
    return [json.loads((FOLDER / name).read_text()) for name in names]


def test_a_card_without_a_model_before_compares_nothing(records):
    assert "compared with the model before" not in card.render(*records)


def test_a_card_compares_with_the_model_before(records):
    config, evaluation, training = records
    newer = copy.deepcopy(evaluation) | {"previous": card.figures_of(evaluation)}
    newer["parameters"] = 20_454_912
    newer["headers_with_defaults"]["loops"] = 3
    text = card.render(config, newer, training)
    assert f"| parameters | 20,454,912 | {evaluation['parameters']:,} |" in text
    loops = evaluation["headers_with_defaults"]["loops"]
    assert f"| with the sampling defaults: end in a loop | 3 | {loops} |" in text


def test_steps_of_a_stage_that_ended_by_the_clock_come_from_its_log(records):
    config, evaluation, training = records
    training["student"]["steps"] = 0
    training["logs"] = {training["student"]["name"]: [{"step": 10}, {"step": 4321}]}
    assert "\n4321 steps of" in card.render(config, evaluation, training)


def test_repeated_text_is_stated_where_it_was_measured(records):
    config, evaluation, training = records
    shares = {"files": 0.0601, "files_and_fragments": 0.52, "held_out_in_training": 0.0118}
    evaluation["data"]["repeated_share"] = shares
    text = card.render(config, evaluation, training)
    assert "6.0% occur more than once" in text
    assert "52.0%; of the held-out files' 1.2% occur" in text

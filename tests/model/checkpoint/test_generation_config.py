"""The sampling defaults of a checkpoint: read, refused where they are out of range, reported where not applied."""

import json
import logging

import pytest

from model.checkpoint.generation_config import read_sampling_defaults
from model.errors import ModelFolderError
from model.sampling.parameters import SamplingDefaults


def write(folder, **content):
    (folder / "generation_config.json").write_text(json.dumps(content))


def test_a_folder_without_the_file_has_the_defaults_of_the_service(tmp_path):
    assert read_sampling_defaults(tmp_path) == SamplingDefaults()


def test_the_sampling_parameters_of_the_file_are_read(tmp_path, caplog):
    write(
        tmp_path,
        bos_token_id=1,
        eos_token_id=[2, 3],
        pad_token_id=0,
        do_sample=True,
        temperature=0.6,
        top_k=20,
        top_p=0.95,
        min_p=None,
        repetition_penalty=1.05,
        max_length=20,
        num_beams=1,
        use_cache=True,
        transformers_version="5.0",
    )
    expected = SamplingDefaults(temperature=0.6, top_k=20, top_p=0.95, repetition_penalty=1.05)
    assert read_sampling_defaults(tmp_path) == expected
    assert caplog.text == ""


def test_whole_numbers_stand_for_numbers_and_a_top_k_of_minus_one_for_all(tmp_path):
    write(tmp_path, temperature=1, top_k=-1, repetition_penalty=2)
    assert read_sampling_defaults(tmp_path) == SamplingDefaults(top_k=-1, repetition_penalty=2.0)


def test_keys_that_would_change_the_text_and_are_not_applied_are_logged(tmp_path, caplog):
    write(tmp_path, no_repeat_ngram_size=3, max_new_tokens=2048, num_beams=4, suppress_tokens=None)
    with caplog.at_level(logging.WARNING):
        assert read_sampling_defaults(tmp_path) == SamplingDefaults()
    assert (
        "max_new_tokens = 2048, no_repeat_ngram_size = 3, num_beams = 4 have no effect"
        in caplog.text
    )


@pytest.mark.parametrize(
    ("key", "value", "message"),
    [
        ("temperature", -0.5, r"temperature must be a number >= 0\.0, found -0\.5"),
        ("temperature", "warm", "temperature must be a number, found 'warm'"),
        ("top_k", 1.5, r"top_k must be a whole number, found 1\.5"),
        ("top_k", -2, "top_k must be a whole number >= -1, found -2"),
        ("top_p", 0, r"top_p must be a number > 0\.0, found 0"),
        ("top_p", 1.5, r"top_p must be a number <= 1\.0, found 1\.5"),
        ("repetition_penalty", 0, r"repetition_penalty must be a number >= 0\.01, found 0"),
    ],
)
def test_a_value_out_of_range_is_an_error_that_names_the_way_out(tmp_path, key, value, message):
    write(tmp_path, **{key: value})
    with pytest.raises(ModelFolderError, match=f"{message}; --generation-config none ignores"):
        read_sampling_defaults(tmp_path)


def test_a_broken_file_is_an_error(tmp_path):
    (tmp_path / "generation_config.json").write_text("{")
    with pytest.raises(ModelFolderError, match=r"generation_config\.json is not valid JSON"):
        read_sampling_defaults(tmp_path)

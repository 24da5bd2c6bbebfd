"""The HTTP layer's part of the settings."""

import json
import re

import pytest

from model.checkpoint.config import ModelConfig
from model.errors import ModelError, ModelFolderError
from model.hub.resolve import resolve
from model.sampling.parameters import SamplingDefaults
from server.cli.service_parts import http_config
from server.cli.settings import Settings
from tests.tiny_checkpoint import write_tiny_checkpoint


@pytest.fixture
def folder(tmp_path):
    write_tiny_checkpoint(tmp_path)
    (tmp_path / "generation_config.json").write_text(json.dumps({"repetition_penalty": 1.5}))
    return tmp_path


def config(folder, **settings):
    model = ModelConfig.from_folder(folder)
    return http_config(Settings(model=str(folder), **settings), folder, model, {}, ())


def test_sampling_defaults_come_from_the_checkpoint_unless_they_are_switched_off(folder):
    assert config(folder).sampling_defaults == SamplingDefaults(repetition_penalty=1.5)
    assert config(folder, generation_config="none").sampling_defaults == SamplingDefaults()


def test_a_broken_file_stops_the_start_unless_it_is_ignored(folder):
    (folder / "generation_config.json").write_text('{"top_p": 7}')
    with pytest.raises(ModelFolderError, match="top_p must be a number <= 1"):
        config(folder)
    assert config(folder, generation_config="none").sampling_defaults == SamplingDefaults()


def test_the_bundled_model_continues_text_unless_it_gets_another_chat_template(folder):
    bundled = resolve("bundled")
    assert config(bundled).continues_text
    assert not config(bundled, chat_template="{{ messages[0].content }}").continues_text
    assert not config(folder).continues_text


@pytest.mark.parametrize(
    ("settings", "error"),
    [
        (
            {"lora_modules": ["a=/x"], "max_loras": 0},
            "--lora-modules has no effect with --max-loras 0",
        ),
        ({"lora_folder": ".", "max_loras": 0}, "--lora-folder has no effect with --max-loras 0"),
        ({"lora_folder": "/no/such/folder"}, "--lora-folder /no/such/folder is not a folder"),
        ({"lora_modules": ["a=/no/such/folder"]}, "--lora-modules a: "),
        (
            {"lora_modules": ["m=/x"], "served_model_name": ["m"]},
            "--lora-modules m: it is a name of the model",
        ),
        ({"lora_modules": ["tgi=/x"]}, "--lora-modules tgi: it means the model"),
        ({"lora_folder": "~nobody-of-this-name/x"}, "--lora-folder ~nobody-of-this-name/x is not"),
    ],
    ids=str,
)
def test_settings_of_adapters_that_cannot_be_used_are_refused(folder, settings, error):
    with pytest.raises(ModelError, match=re.escape(error)):
        config(folder, **settings)


def test_the_folder_of_adapters_may_be_in_a_home(folder, monkeypatch):
    monkeypatch.setenv("HOME", str(folder.parent))
    assert config(folder, lora_folder=f"~/{folder.name}").lora_folder == str(folder)


def test_slots_are_there_where_adapters_may_be(folder):
    assert config(folder).max_loras == 0
    assert config(folder).lora_base is None
    assert config(folder, max_loras=3).max_loras == 3
    with_folder = config(folder, lora_folder=str(folder))
    assert (with_folder.max_loras, with_folder.lora_base.max_rank) == (8, 16)

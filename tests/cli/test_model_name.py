"""The model's name in the settings of a service."""

import pytest

from model.errors import ModelFolderError
from model.hub.known_models import SEVERAL
from server.cli.bench.engine.options import shape_folder, shapes
from server.cli.model_name import with_model_name
from server.cli.settings import Settings


def named(**settings):
    result = with_model_name(Settings(**settings))
    return result.model, result.revision


def test_the_service_shows_the_repository_and_not_what_was_typed():
    assert named(model="qwen3-0.6b") == ("Qwen/Qwen3-0.6B", None)
    assert named(model="hf.co/org/name/tree/v1") == ("org/name", "v1")


def test_settings_that_say_it_already_stay_what_they_are(tmp_path):
    for settings in (Settings(), Settings(model="org/name", revision="v1"), Settings(model=str(tmp_path))):  # fmt: skip
        assert with_model_name(settings) is settings


@pytest.mark.parametrize("shape", shapes())
def test_every_shape_is_a_shape_in_any_case_and_leads_to_a_model(shape):
    assert shape_folder(shape.upper()) == shape_folder(shape)
    if shape in SEVERAL:
        with pytest.raises(ModelFolderError, match=r"is no name of one model: give \S+/"):
            named(model=shape)
    else:
        assert named(model=shape)[0].casefold().rpartition("/")[2] == shape


def test_serving_a_name_of_another_program_is_an_error_of_one_line(tessera):
    for command in ("warmup", "bench engine", "plan", "run", "pull"):
        status, out, err = tessera(*command.split(), "llama3.2:1b")

        assert (status, out) == (1, "")
        assert err.startswith(f"tessera {command}: error: 'llama3.2:1b' is Ollama's name of meta-")
        assert err.count("\n") == 1

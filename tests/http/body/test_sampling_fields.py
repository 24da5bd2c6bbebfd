"""The fields of request bodies that are made from the sampling parameters."""

import math

import pytest

from model.sampling.parameters import FILTERS, NUMBERS, SamplingDefaults, SamplingParams
from server.errors import ValidationError
from server.http.body.validation import parse
from server.http.config import HTTPConfig
from server.http.dialects.openai.schema import ChatBody, CompletionBody
from server.http.dialects.tgi.schema import GenerateParameters
from tests.http.fakes import INFO

REQUIRED = {
    GenerateParameters: {},
    CompletionBody: {"prompt": "a"},
    ChatBody: {"messages": [{"role": "user", "content": "a"}]},
}
BEYOND = {"ge": -math.inf, "gt": -math.inf, "le": math.inf}


@pytest.fixture(params=REQUIRED, ids=lambda model: model.__name__)
def read(request):
    """Return a function that reads a body with some sampling parameters."""
    return lambda **fields: parse(request.param, REQUIRED[request.param] | fields)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_parameter_with_limits_is_a_field_with_them(read, name):
    number = NUMBERS[name]
    for limit, end in number.limits.items():
        beyond = end if limit == "gt" else math.nextafter(end, BEYOND[limit])
        outside = end + int(math.copysign(1e6, BEYOND[limit])) if number.type is int else beyond
        with pytest.raises(ValidationError, match=f"`{name}` must be [<>]"):
            read(**{name: outside})
    assert number.allows(number.neutral)


@pytest.mark.parametrize("name", NUMBERS)
def test_every_field_is_described(name):
    for model in REQUIRED:
        assert model.model_fields[name].description.endswith(".")


def test_fields_that_are_left_out_have_the_defaults_and_others_count(read):
    config, defaults = HTTPConfig(model_id="m"), SamplingDefaults(top_p=0.75, min_p=0.125)

    made = read(min_p=0.5, presence_penalty=1).sampling_params(config, INFO, defaults, seed=7)

    assert made == SamplingParams(
        max_new_tokens=1, top_p=0.75, min_p=0.5, presence_penalty=1.0, seed=7
    )


@pytest.mark.parametrize("name", FILTERS)
def test_a_filter_that_keeps_all_tokens_is_none(name):
    assert not SamplingParams(max_new_tokens=1, **{name: FILTERS[name]}).is_filtered
    assert SamplingParams(max_new_tokens=1, **{name: NUMBERS[name].type(0.5) or 1}).is_filtered

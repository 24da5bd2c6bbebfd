"""The files of real checkpoints are read as their classes in transformers read them."""

import math

import pytest

from model.checkpoint.config import ModelConfig
from model.errors import ModelFolderError, UnsupportedModelError
from model.families.table import FAMILIES
from model.network.spec import Rotary
from tests.model.families.files import FILES


def read(name, **changes):
    architecture, _, keys = FILES[name]
    named = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
    return ModelConfig.from_dict(named | keys | changes)


@pytest.mark.parametrize("name", FILES)
def test_the_files_of_real_checkpoints_are_read(name):
    config = read(name)

    assert config.network.num_parameters == FILES[name][1]
    assert ModelConfig.from_dict(config.to_dict()) == config


def test_only_layers_of_olmo3_without_a_window_extend_the_context():
    config = read("OLMo-3-7B")

    rotaries = {mixer.window: mixer.rotary for mixer in config.network.attentions}
    assert rotaries[4096] == Rotary(theta=500_000.0)
    assert (rotaries[None].rope_type, rotaries[None].theta) == ("yarn", 500_000.0)
    windows = [mixer.window for mixer in config.network.attentions]
    assert windows == [4096, 4096, 4096, None] * 8


@pytest.mark.parametrize("pattern", ["LLLG", 4])
def test_layers_of_a_hybrid_exaone_without_a_window_do_not_rotate(pattern):
    config = read("EXAONE-4.0-32B", sliding_window_pattern=pattern)

    mixers = config.network.attentions
    assert [mixer.window for mixer in mixers] == [4096, 4096, 4096, None] * 16
    assert all((mixer.rotary is None) == (mixer.window is None) for mixer in mixers)


def test_every_layer_of_an_exaone_without_windows_rotates():
    assert None not in {mixer.rotary for mixer in read("EXAONE-4.0-1.2B").network.attentions}


def test_the_base_of_hunyuan_grows_by_its_alpha():
    mixer = read("Hunyuan-0.5B").network.attentions[0]

    assert mixer.rotary == Rotary(theta=10_000.0 * 1000.0 ** (128 / 126))
    assert mixer.late_qk_norm


def test_hunyuan_without_norms_has_none():
    mixer = read("Hunyuan-0.5B", use_qk_norm=False).network.attentions[0]

    assert (mixer.qk_norm, mixer.late_qk_norm) == (None, False)


def test_absent_rope_parameters_are_those_of_the_class():
    def rotary(name):
        architecture, _, keys = FILES[name]
        kept = {key: it for key, it in keys.items() if not key.startswith("rope")}
        named = {"architectures": [architecture], "model_type": FAMILIES[architecture].model_type}
        return ModelConfig.from_dict(named | kept).network.attentions[0].rotary

    assert rotary("Apertus-8B") == Rotary("llama3", 12_000_000.0, 8.0, 8192)
    assert rotary("cwm") == Rotary("llama3", 1_000_000.0, 16.0, 8192)
    assert math.isclose(rotary("helium-1-2b").theta, 100_000.0)
    assert math.isclose(rotary("ERNIE-4.5-0.3B").theta, 500_000.0)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("ERNIE-4.5-0.3B", {"compression_ratio": 2.0}, "compression_ratio = 2.0"),
        ("Hunyuan-0.5B", {"use_cla": True}, "use_cla = True"),
        ("Hunyuan-0.5B", {"num_experts": 8}, "num_experts = 8"),
        ("Hunyuan-0.5B", {"rope_scaling": {"type": "yarn", "factor": 2.0}}, "rope type 'yarn'"),
        ("Apertus-8B", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("Apertus-8B", {"qk_norm": False}, "qk_norm = False"),
        ("Apertus-8B", {"post_norm": True}, "post_norm = True"),
        ("AFM-4.5B", {"hidden_act": "silu"}, "hidden_act = 'silu'"),
        ("Minitron-4B", {"hidden_act": "gelu"}, "hidden_act = 'gelu'"),
        ("cwm", {"attention_bias": True}, "attention_bias = True"),
    ],
)
def test_an_unsupported_variant_is_rejected_with_its_key(name, changes, message):
    with pytest.raises(UnsupportedModelError, match=message):
        read(name, **changes)


@pytest.mark.parametrize(
    ("name", "changes", "message"),
    [
        ("EXAONE-4.0-32B", {"sliding_window_pattern": "LLX"}, "letters L and G, found 'LLX'"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": ""}, "letters L and G, found ''"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": -1}, "sliding_window_pattern must be"),
        ("EXAONE-4.0-32B", {"sliding_window_pattern": [1]}, "sliding_window_pattern must be"),
        ("Minitron-4B", {"norm_eps": "x"}, "norm_eps must be a number"),
        ("cwm", {"sliding_window": 0}, "sliding_window must be"),
        (
            "Hunyuan-0.5B",
            {"rope_scaling": {"type": "dynamic", "alpha": -1.0}},
            "rope_scaling.alpha must be",
        ),
    ],
)
def test_the_error_for_an_invalid_value_names_the_key(name, changes, message):
    with pytest.raises(ModelFolderError, match=message):
        read(name, **changes)

"""The benchmark shapes match the models of their names."""

from pathlib import Path

import pytest

from model.checkpoint.config import ModelConfig

SHAPES = Path(__file__).parents[3] / "server" / "cli" / "bench" / "shapes"


@pytest.mark.parametrize(
    ("name", "num_parameters", "heads", "context"),
    [
        ("qwen3-0.6b", 596_049_920, (16, 8, 128), 40960),
        ("llama-3.2-1b", 1_235_814_400, (32, 8, 64), 131072),
        ("llama-3.1-8b", 8_030_261_248, (32, 8, 128), 131072),
        ("smollm2-135m", 134_515_008, (9, 3, 64), 8192),
    ],
)
def test_a_shape_has_the_parameter_count_of_the_model_of_its_name(
    name, num_parameters, heads, context
):
    config = ModelConfig.from_folder(SHAPES / name)

    assert config.num_parameters == num_parameters
    assert (config.num_heads, config.num_kv_heads, config.head_dim) == heads
    assert config.max_context == context


def test_every_shape_is_checked():
    assert len(list(SHAPES.iterdir())) == 4

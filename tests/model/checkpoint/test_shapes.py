"""The benchmark shapes match the models of their names."""

from pathlib import Path

import pytest

from model.checkpoint.config import ModelConfig

SHAPES = Path(__file__).parents[3] / "server" / "cli" / "bench" / "shapes"


@pytest.mark.parametrize(
    ("name", "num_parameters", "heads", "context"),
    [
        ("qwen3-0.6b", 596_049_920, (16, 8, 128), 40960),
        ("qwen3-0.6b-yarn", 596_049_920, (16, 8, 128), 131072),
        ("llama-3.2-1b", 1_235_814_400, (32, 8, 64), 131072),
        ("llama-3.1-8b", 8_030_261_248, (32, 8, 128), 131072),
        ("smollm2-135m", 134_515_008, (9, 3, 64), 8192),
        ("smollm2-360m", 361_821_120, (15, 5, 64), 8192),
        ("qwen2.5-0.5b", 494_032_768, (14, 2, 64), 32768),
        ("qwen2.5-1.5b", 1_543_714_304, (12, 2, 128), 131072),
        ("llama-3.2-3b", 3_212_749_824, (24, 8, 128), 131072),
        ("qwen3-1.7b", 1_720_574_976, (16, 8, 128), 40960),
        ("qwen3-4b", 4_022_468_096, (32, 8, 128), 40960),
        ("mistral-7b", 7_248_023_552, (32, 8, 128), 32768),
        # The model's context is 2048 tokens; here a prompt of 4096 has to fit.
        ("tinyllama-1.1b", 1_100_048_384, (32, 4, 64), 8192),
        ("gemma-3-1b", 999_885_952, (4, 1, 256), 32768),
        ("gpt2", 124_439_808, (12, 12, 64), 1024),
        ("opt-125m", 125_239_296, (12, 12, 64), 2048),
        ("qwen3.5-0.8b", 752_393_024, (8, 2, 256), 262_144),
        ("qwen3.5-2b", 1_881_825_088, (8, 2, 256), 262_144),
        ("qwen3.5-4b", 4_205_751_296, (16, 4, 256), 262_144),
        ("lfm2-1.2b", 1_170_340_608, (32, 8, 64), 128_000),
        ("granite-4.0-h-micro", 3_191_396_096, (32, 8, 64), 131_072),
        ("falcon-h1-1.5b", 1_554_789_760, (8, 2, 128), 131_072),
    ],
)
def test_a_shape_has_the_parameter_count_of_the_model_of_its_name(
    name, num_parameters, heads, context
):
    config = ModelConfig.from_folder(SHAPES / name)

    assert config.network.num_parameters == num_parameters
    mixer = config.network.attentions[0]
    assert (mixer.num_heads, mixer.num_kv_heads, mixer.head_dim) == heads
    assert config.max_context == context


def test_the_shape_of_gemma_has_a_window_in_five_of_six_layers():
    config = ModelConfig.from_folder(SHAPES / "gemma-3-1b")

    windows = [layer.mixer.window for layer in config.network.layers]
    assert windows == [None if layer % 6 == 5 else 512 for layer in range(26)]


def test_every_shape_is_checked():
    assert len(list(SHAPES.iterdir())) == 22

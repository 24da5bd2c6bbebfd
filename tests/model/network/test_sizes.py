"""Sizes from a network alone, compared with those of the parameters."""

import itertools

import pytest
import torch

from kernels.collective.communicator import AbsentRanks
from kernels.weight_format import FP8_ROWS, WeightFormat
from model.checkpoint.config import ModelConfig
from model.decoder import DecoderLM
from model.hub.resolve import BUNDLED, resolve
from model.network.sizes import ModelSizes, table_bytes
from server.cli.bench.engine.options import SHAPES, shapes
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.configs import model_config

BLOCKS = WeightFormat("blocks", 8, group=128, scales="block")
GROUPS = WeightFormat("groups", 4, group=32, scales="group", shifts=True, float=False)
SIZES = {
    "vocab_size": 51,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_layers": 3,
    "num_heads": 4,
    "num_kv_heads": 2,
    "max_position_embeddings": 77,
}
PARTS = {
    "positions and biases": {
        "rope": None,
        "position_offset": 2,
        "norm": "layer",
        "attention_bias": True,
        "attention_output_bias": True,
        "mlp_bias": True,
        "gated_mlp": False,
    },
    "float32 norms": {"norms_add_one": True, "post_norms": True, "qk_norm": True},
    "joint norms": {"pre_norms": False, "post_norms": True, "qk_norm": True, "joint_qk_norm": True},
    "norms by head": {"qk_norm_by_head": True},
    "tied": {"tie_word_embeddings": True},
    "parallel": {"norm": "layer", "parallel": True, "mlp_bias": True},
    "one norm without a bias": {
        "norm": "layer",
        "norm_bias": False,
        "norms_add_one": True,
        "parallel": True,
        "shared_norm": True,
        "head_bias": True,
    },
    "parameters of the activation": {"activation": "xielu", "gated_mlp": False},
}


def check(config, dtype, form, num_ranks):
    ranks = AbsentRanks(num_ranks) if num_ranks > 1 else None
    model = DecoderLM(config, getattr(torch, dtype), "meta", form, ranks)
    sizes = ModelSizes(config.network, dtype, form, num_ranks)

    assert sizes.weight_bytes == model.weight_bytes
    assert sizes.network == model.network
    assert sizes.weight_format.name == model.weight_format.name
    tables = (
        model.embed_tokens,
        model.embed_positions,
        model.lm_head,
        getattr(model, "embed_per_layer", None),
    )
    assert table_bytes(model.network, dtype, num_ranks) == sum(
        it.nbytes for it in tables if it is not None
    )


@pytest.mark.parametrize("shape", [BUNDLED, *shapes()])
def test_the_sizes_are_those_of_the_parameters(shape):
    config = ModelConfig.from_folder(resolve(BUNDLED) if shape == BUNDLED else SHAPES / shape)
    ranks = [it for it in (1, 2) if not config.parallel_unsupported(it)]
    for dtype, form, num_ranks in itertools.product(
        ("bfloat16", "float32"), (None, FP8_ROWS, BLOCKS, GROUPS), ranks
    ):
        check(config, dtype, form, num_ranks)


@pytest.mark.parametrize("case", ["gemma4", "gemma4 values from keys biases", "gemma3n"])
def test_other_sublayers_and_layers_without_keys_are_counted(case):
    config = ModelConfig.from_dict(CASES[case].content)

    for dtype, form in itertools.product(("bfloat16", "float32"), (None, FP8_ROWS, GROUPS)):
        check(config, dtype, form, 1)


@pytest.mark.parametrize("parts", PARTS.values(), ids=PARTS)
def test_norms_biases_and_positions_are_counted(parts):
    config = model_config(**SIZES, **parts)

    for dtype, num_ranks in itertools.product(("bfloat16", "float32"), (1, 2)):
        check(config, dtype, None, num_ranks)

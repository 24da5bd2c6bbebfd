"""Ranks that share a model with recurrent layers compute what the whole model computes."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from kernels.collective.communicator import AbsentRanks
from kernels.weight_format import FP8_ROWS
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.decoder import DecoderLM
from model.network.matrix import shard_sections
from model.network.mixers import Mamba2, ShortConv
from model.network.parallel import Section, shard_network
from model.network.state import fixed_of
from tests.model.checkpoint import format_samples
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.executors.paged import PagedDriver
from tests.model.network.ranks import ThreadRanks
from tests.model.network.test_sizes import check

TOKENS = [(7 * i) % 120 + 2 for i in range(80)]
STEPS = [
    {"a": TOKENS[:33]}, {"a": TOKENS[33:50], "b": TOKENS[3:5]}, {"a": [7], "b": TOKENS[5:70]}, {"a": [9], "b": [4]},
]  # fmt: skip
HYBRIDS = {
    "qwen3.5": {"linear_num_key_heads": 4, "linear_num_value_heads": 4},
    "qwen3.5 more value heads tied biases": {"linear_num_key_heads": 4},
    "lfm2": {},
    "lfm2 untied biases": {},
    "granite4": {},
    "granite4 rope tied biases groups": {},
    "bamba": {},
    "bamba tied biases groups": {},
    "falcon h1": {},
    "falcon h1 norm after gate": {},
}
ONE_NORM = ("granite4", "granite4 rope tied biases groups", "bamba", "falcon h1 norm after gate")
"""With a norm of a group that ranks divide: of one group, or of two among four ranks."""


def save(folder, name, **changes):
    """Save a checkpoint that four ranks can share; return its configuration."""
    case, more = CASES[name], {"num_key_value_heads": 4} | HYBRIDS.get(name, {}) | changes
    dataclasses.replace(case, changes=case.changes | more).save(folder)
    return ModelConfig.from_folder(folder)


def drive(model):
    driver = PagedDriver(model)
    return [driver.step(chunks) for chunks in STEPS]


def part(folder, config, communicator, load_format="auto", **options):
    model = load_part(
        folder, config, torch.float32, "cpu", load_format, communicator=communicator, **options
    )
    model.optimize()
    return model


def check_ranks(size, compute, whole):
    for found in (ranks := ThreadRanks(size).run(lambda it: drive(compute(it)))):
        for step, expected in enumerate(whole):
            for name, logits in expected.items():
                assert torch.equal(found[step][name], ranks[0][step][name])
                bound = 2e-4 * logits.abs().max().item()
                torch.testing.assert_close(found[step][name], logits, rtol=0, atol=bound)


@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("name", HYBRIDS)
def test_ranks_compute_the_logits_of_the_whole_model(tmp_path, name, size):
    config = save(tmp_path, name)
    assert config.parallel_unsupported(size) == ()
    whole = drive(load_model(tmp_path, config, torch.float32, "cpu"))

    check_ranks(size, lambda ranks: part(tmp_path, config, ranks), whole)


@pytest.mark.parametrize("name", ["qwen3.5", "falcon h1"])
def test_ranks_hold_their_part_of_matrices_in_blocks(tmp_path, name, monkeypatch):
    inputs = "in_proj_qkv.weight", "in_proj_z.weight"
    monkeypatch.setattr(format_samples, "MATRICES", (*format_samples.MATRICES, *inputs))
    sizes = {"linear_value_head_dim": 16} if name == "qwen3.5" else {"mamba_d_ssm": 128}
    save(tmp_path, name, **sizes)
    described = format_samples.HF_FP8 | {"fmt": "e4m3", "weight_block_size": [16, 16]}
    format_samples.store(
        tmp_path,
        format_samples.blocks(16),
        "weight_scale_inv",
        described,
        keep=("lm_head", "in_proj_a", "in_proj_b"),
    )
    config = ModelConfig.from_folder(tmp_path)
    form = {"weight_format": config.weight_format}
    whole = drive(load_model(tmp_path, config, torch.float32, "cpu", **form))

    check_ranks(2, lambda ranks: part(tmp_path, config, ranks, **form), whole)
    (matrix, *_) = ThreadRanks(2).run(
        lambda ranks: load_part(
            tmp_path, config, torch.float32, "cpu", communicator=ranks, **form
        ).decoder_layers[0].matrices["input"]
    )  # fmt: skip
    assert (matrix.format.bits, matrix.format.group) == (8, 16)


@pytest.mark.parametrize("name", ["qwen3.5", "granite4 rope tied biases groups", "falcon h1"])
def test_dummy_weights_are_those_of_the_whole_model(tmp_path, name):
    config = save(tmp_path, name)
    whole = drive(load_model(tmp_path, config, torch.float32, "cpu", "dummy"))

    check_ranks(4, lambda ranks: part(tmp_path, config, ranks, "dummy"), whole)


@pytest.mark.parametrize("name", HYBRIDS)
def test_a_rank_has_its_part_of_the_states_and_of_the_weights(tmp_path, name):
    config = save(tmp_path, name)
    network = config.network
    for size in (2, 4):
        rank = shard_network(network, size)
        for layer, whole in zip(rank.layers, network.layers, strict=True):
            states, wholes = (fixed_of(it.mixer.state("float32")) for it in (layer, whole))
            if states is None:
                continue
            if isinstance(layer.mixers[-1], ShortConv):
                assert states.num_bytes[0] * size == wholes.num_bytes[0]
            else:
                assert states.num_bytes[1] * size == wholes.num_bytes[1]
        assert network.state("float32").token_bytes == size * rank.state("float32").token_bytes
        for form in (None, FP8_ROWS):
            check(config, "bfloat16", form, size)


@pytest.mark.parametrize(
    ("groups", "size", "of_rank", "norm_ranks"), [(1, 2, 1, 2), (2, 2, 1, 1), (4, 2, 2, 1), (2, 4, 1, 2)]
)  # fmt: skip
def test_ranks_have_whole_groups_of_mamba2_or_one_that_others_have_too(
    groups, size, of_rank, norm_ranks
):
    case = CASES["granite4"]
    content = case.content | {"mamba_n_groups": groups, "num_key_value_heads": 4}
    layers = shard_network(ModelConfig.from_dict(content).network, size).layers

    (mixer,) = {it.mixer for it in layers if isinstance(it.mixer, Mamba2)}
    assert (mixer.num_heads, mixer.num_groups) == (8 // size, of_rank)
    assert mixer.norm_ranks == norm_ranks


def test_rows_of_a_section_that_are_fewer_parts_than_ranks_are_on_ranks_beside_each_other():
    whole = torch.arange(6)
    of = (Section(1, 4, 1), Section(1, 2, 2))

    assert [shard_sections(whole, of, rank).tolist() for rank in range(4)] == [
        [0, 4], [1, 4], [2, 5], [3, 5],
    ]  # fmt: skip


@pytest.mark.parametrize(
    ("name", "changes", "size", "reason"),
    [
        ("qwen3.5", {"linear_num_value_heads": 6, "linear_num_key_heads": 3}, 2,
         "2 is no divisor of its 3 key heads of the gated delta rule"),
        ("lfm2", {"hidden_size": 72, "num_attention_heads": 6, "num_key_value_heads": 3}, 16,
         "16 is no divisor of its 72 channels of a short convolution"),
        ("granite4", {"mamba_n_heads": 2, "mamba_d_head": 64}, 4,
         "4 is no divisor of its 2 heads of Mamba-2"),
        ("bamba", {"mamba_n_heads": 8, "mamba_n_groups": 8}, 3,
         "3 is neither a divisor nor a multiple of its 8 groups of Mamba-2"),
        ("falcon h1 norm tied biases", {}, 4,
         "4 ranks would divide the norm of Mamba-2 before its gate, which is of 2 groups: at most 2 ranks"),
        ("falcon h1", {"num_key_value_heads": 2}, 4, "4 is no divisor of its 2 key-value heads"),
    ],
)  # fmt: skip
def test_what_cannot_be_divided_is_named(name, changes, size, reason):
    config = ModelConfig.from_dict(CASES[name].content | {"num_key_value_heads": 4} | changes)

    assert reason in config.parallel_unsupported(size)
    assert config.parallel_unsupported(1) == ()


def test_a_norm_before_the_gate_of_whole_groups_is_divided(tmp_path):
    config = save(tmp_path, "falcon h1 norm tied biases")
    whole = drive(load_model(tmp_path, config, torch.float32, "cpu"))

    check_ranks(2, lambda ranks: part(tmp_path, config, ranks), whole)


@pytest.mark.parametrize("name", ONE_NORM)
def test_ranks_exchange_sums_of_a_norm_once_for_each_layer(tmp_path, name):
    config = save(tmp_path, name)

    def exchanged(communicator):
        model = part(tmp_path, config, communicator)
        driver = PagedDriver(model)
        before = communicator.num_bytes
        driver.step({"a": TOKENS[:8]})
        return communicator.num_bytes - before, model.network

    for found, network in ThreadRanks(4).run(exchanged):
        mixers = [it for layer in network.layers for it in layer.mixers]
        norms = [it for it in mixers if isinstance(it, Mamba2)]
        assert {it.norm_ranks for it in norms} <= {2, 4}
        sums = 8 * 8 * 4 * sum(4 // it.norm_ranks for it in norms)
        biases = len(mixers) + len(network.layers)
        logits = 8 * -(-network.vocab // 4) * 4
        assert found == 8 * network.hidden * 4 * biases + sums + logits


def test_a_planned_rank_needs_no_other_ranks(tmp_path):
    config = save(tmp_path, "granite4")
    model = DecoderLM(config, torch.float32, "meta", None, AbsentRanks(2))

    assert model.network == shard_network(config.network, 2)

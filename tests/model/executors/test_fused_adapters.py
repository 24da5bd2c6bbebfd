"""Layers with adapters as on a GPU, in Triton's interpreter, compared with weights to which the adapters are added."""

import pytest
import torch

import kernels.linear.lora
import model.executors.layers.executor
from model.network.adapter_slots import Update
from model.network.matrix_shapes import matrix_shapes
from tests.kernels import triton_interpreter
from tests.model.checkpoint.hf_checkpoints import CASES
from tests.model.executors import test_fused_hybrids, test_fused_layers
from tests.model.executors.adapted_steps import AdaptedSteps
from tests.model.executors.test_fused_layers import FAMILIES, build

pytestmark = triton_interpreter.interpreted
on_a_gpu = test_fused_layers.on_a_gpu
RANK, SLOTS = 5, 2
_MAMBA = {"mamba_n_heads": 4, "mamba_d_head": 16, "hidden_size": 32, "head_dim": 16}
HYBRIDS = {
    "qwen3.5": test_fused_hybrids.CONFIG,
    "lfm2": CASES["lfm2"].content | {"vocab_size": 24},
    "granite4": CASES["granite4"].content | _MAMBA | {"vocab_size": 24},
    "falcon h1": CASES["falcon h1"].content | _MAMBA | {"vocab_size": 24, "mamba_d_ssm": 64},
}


@pytest.fixture
def kernels_for_adapters(monkeypatch):
    """Add what adapters make with the kernels for GPUs."""
    from kernels.linear.gpu.lora import sorted_rows

    rows_of = model.executors.layers.executor.lora_rows

    def switch():
        target = "kernels.linear.gpu.lora:begin_lora"
        monkeypatch.setattr(kernels.linear.lora, "_target", lambda _: target)
        monkeypatch.setattr(
            model.executors.layers.executor, "lora_rows", lambda it: sorted_rows(rows_of(it).slots)
        )

    return switch


def random_updates(network, seed):
    generator = torch.Generator().manual_seed(seed)

    def normal(*size):
        return 0.2 * torch.randn(size, generator=generator)

    return {
        (index, name): Update(
            normal(len(shape.parts), RANK, shape.inputs), normal(RANK, sum(shape.parts))
        )
        for index, matrices in enumerate(matrix_shapes(network))
        for name, shape in matrices.items()
    }


def merged(updates, made):
    """Add an adapter to the weights of a model."""
    shapes = matrix_shapes(made.network)
    for (index, name), update in updates.items():
        parts = update.b.split(list(shapes[index][name].parts), 1)
        added = torch.cat([b.T @ a for a, b in zip(update.a, parts, strict=True)])
        made.decoder_layers[index].matrices[name].numbers.add_(added)
    return made


@pytest.mark.parametrize(
    "family", ["llama biases", "gemma2", "gpt2", "gpt_neox", "olmo2", "apertus", "layers without norms"]
)  # fmt: skip
def test_layers_with_adapters_match_merged_weights(family, on_a_gpu, kernels_for_adapters):
    check(
        lambda: build(**FAMILIES[family]).requires_grad_(requires_grad=False),
        on_a_gpu,
        kernels_for_adapters,
    )


@pytest.mark.parametrize("name", HYBRIDS)
def test_recurrent_layers_with_adapters_match_merged_weights(name, on_a_gpu, kernels_for_adapters):
    fused = check(
        lambda: test_fused_hybrids.build(config=HYBRIDS[name]), on_a_gpu, kernels_for_adapters
    )

    joined = {name for it in fused.executors.layers.bound.layers for name in it.included.values()}
    assert joined == ({"gates"} if name == "qwen3.5" else set())


def check(build_model, on_a_gpu, kernels_for_adapters):
    """Compare a model that kernels for GPUs compute with those whose weights include the adapters; returns it."""
    plain = build_model()
    updates = [random_updates(plain.network, seed) for seed in range(SLOTS)]
    models = [merged(it, build_model()) for it in updates] + [plain]
    slots = (1, -1, 0, 1)
    ids = [list(range(1, 6 + i)) for i in range(len(slots))]
    expected = []
    for at, tokens in zip(slots, ids, strict=True):
        steps = AdaptedSteps(models[at])
        expected.append(steps.step(prefill=[(steps.sequence(tokens), 0, len(tokens))]))
    on_a_gpu()
    kernels_for_adapters()
    fused = build_model()
    fused.optimize()
    fused.reserve_adapters(SLOTS, 16)
    for slot, it in enumerate(updates):
        fused.adapters.write(slot, it)

    with triton_interpreter.poisoned_memory():
        steps = AdaptedSteps(fused)
        sequences = [steps.sequence(it, slot) for it, slot in zip(ids, slots, strict=True)]
        counts = [len(it) - 1 for it in ids]
        first = steps.step(prefill=[(it, 0, n) for it, n in zip(sequences, counts, strict=True)])
        last = steps.step(decode=sequences)

    parts = zip(first.split(counts), last[:, None], expected, strict=True)
    for chunk, token, truth in parts:
        torch.testing.assert_close(torch.cat((chunk, token)), truth, rtol=1e-3, atol=1e-3)
    return fused

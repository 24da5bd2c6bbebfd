"""Hopper attention kernels against the portable ones in a whole model: the same tokens except near ties."""

import functools

import pytest
import torch

import kernels
import model.executors.layers.attention_plans
from kernels.attention.registry import REGISTRY
from model.decoder import DecoderLM
from tests.gpu.test_single_launch_gpu import MODELS
from tests.model.configs import changed
from tests.model.executors import paged
from tests.model.executors.paged import PagedDriver

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(240)]

LENGTHS = (1, 17, 64, 200, 333)
STEPS = 48


def build(name, dtype, device="cuda"):
    config = changed(MODELS[name], vocab_size=2048)
    built = DecoderLM(config, dtype, device)
    built.init_weights(std=0.02, seed=0)
    return built.requires_grad_(requires_grad=False)


def use_portable_rows(monkeypatch, device="cuda"):
    """Plan attention without the Hopper rows; return the set that collects the names of the selected rows."""
    rows, chosen = [row for row in REGISTRY if not row.name.startswith("hopper")], set()
    plan = kernels.plan_attention

    def plan_portably(problem, batch):
        selection = kernels.select(problem, kernels.detect(device), rows)
        chosen.add(selection.spec.name)
        return plan(problem, batch, selection=selection)

    monkeypatch.setattr(model.executors.layers.attention_plans, "plan_attention", plan_portably)
    return chosen


def drive(built, tokens=None, lengths=LENGTHS, steps=STEPS):
    """Decode greedily, or with the given `tokens` as input.

    Returns:
        Tokens [steps + 1, sequences], and the float32 logits of each [steps + 1, sequences, V].
    """
    driver = PagedDriver(built, num_blocks=160)
    generator = torch.Generator().manual_seed(1)
    found = driver.step(
        {
            i: torch.randint(5, 500, (n,), generator=generator).tolist()
            for i, n in enumerate(lengths)
        }
    )
    rows, sampled = [], []
    for step in range(steps + 1):
        rows.append(torch.stack([found[i][-1].float() for i in range(len(lengths))]))
        sampled.append((rows[-1].argmax(-1) if tokens is None else tokens[step]).tolist())
        if step < steps:
            found = driver.step({i: [token] for i, token in enumerate(sampled[-1])})
    return torch.tensor(sampled), torch.stack(rows)


def compare(portable, own, truth, tokens):
    """Return both largest errors, and where float32's best token leads by more than twice the larger error."""
    errors = [(logits - truth).abs().amax(-1) for logits in (portable, own)]
    first, second = truth.topk(2, -1).values.unbind(-1)
    sure = first - second > 2 * torch.maximum(*errors)
    assert torch.equal(own.argmax(-1)[sure].cpu(), tokens.to(own.device)[sure].cpu())
    return (*(float(error.max()) for error in errors), sure)


@pytest.mark.parametrize("name", ["qwen", "llama"])
def test_greedy_tokens_equal_those_of_the_portable_kernels_except_near_ties(
    name, monkeypatch, record_property
):
    if kernels.detect("cuda").sm != 90:
        pytest.skip("the Hopper rows need sm_90")
    monkeypatch.setattr(paged, "BLOCK_SIZE", 16)
    built = build(name, torch.bfloat16)
    wide = build(name, torch.float32)
    wide.load_state_dict(built.state_dict())
    built.optimize()
    run = functools.partial(drive, built)

    with monkeypatch.context() as patch:
        chosen = use_portable_rows(patch)
        tokens, portable = run()
    assert chosen == {"portable_prefill", "portable_decode"}
    _, own = run(tokens)
    _, truth = drive(wide, tokens)
    portable_error, own_error, sure = compare(portable, own, truth, tokens)

    same = int((own.argmax(-1).cpu() == tokens).sum())
    record_property(
        "proof",
        f"{name}: {same} of {tokens.numel()} tokens are the same, {int(sure.sum())} have a clear winner; "
        f"largest error {own_error:.4f}, of the portable kernels {portable_error:.4f}",
    )
    assert own_error <= 1.5 * portable_error
    assert int(sure.sum()) > sure.numel() // 2

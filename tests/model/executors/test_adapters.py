"""Models with an adapter for each sequence compute what PEFT and transformers compute of each alone."""

import copy
import dataclasses

import pytest
import torch

from kernels.cpu.library import load as load_library
from kernels.weight_format import INT8_GROUPS
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.executors.columns import ADAPTER, Bucket
from model.executors.table import EXECUTORS
from tests.kernels.references.problems import assert_no_worse_than
from tests.model.adapters.peft_adapters import ALL_LINEAR, HYBRIDS, adapted, all_linear
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE
from tests.model.executors.adapted_steps import AdaptedSteps, write_adapter, write_adapters

FAMILIES = {
    "llama": "llama",
    "llama biases": "llama",
    "qwen3": "llama",
    "gemma3": "llama",
    "granite": "llama",
    "phi3": "phi3",
    "gpt2": "gpt2",
}
RANKS = (1, 8, 64)
SIZES = {"hidden_size": 128, "intermediate_size": 192}
needs_library = pytest.mark.skipif(
    isinstance(load_library(), str), reason="the C library does not run here"
)


def tokens(count, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(VOCAB_SIZE, (count,), generator=generator).tolist()


def checkpoint(case, folder, kind="llama", ranks=RANKS):
    """Save a model and adapters; return its configuration, the folders and the models with and without them."""
    adapters = [(rank, all_linear(kind)) for rank in ranks]
    return checkpoint_with(case, folder, adapters)


def checkpoint_with(case, folder, adapters):
    """Do the same with adapters of some ranks and modules."""
    plain = case.save(folder / "base")
    folders = [folder / str(seed) for seed in range(len(adapters))]
    models = [
        adapted(copy.deepcopy(plain), it, rank, targets, seed)
        for seed, (it, (rank, targets)) in enumerate(zip(folders, adapters, strict=True))
    ]
    return ModelConfig.from_folder(folder / "base"), folders, [*models, plain.eval()]


def computed(steps, sequences, splits):
    """Compute sequences in steps with all of them; return the logits of each.

    Args:
        splits: the first position of each sequence's second chunk; its last token is a decode row.
    """
    found = [[] for _ in sequences]

    def note(order, counts, logits):
        for at, part in zip(order, logits.split(counts), strict=True):
            found[at].append(part)

    order = range(len(sequences))
    lengths = [it.num_tokens for it in sequences]
    note(
        order,
        splits,
        steps.step(prefill=[(it, 0, n) for it, n in zip(sequences, splits, strict=True)]),
    )
    rest = [n - 1 - split for n, split in zip(lengths, splits, strict=True)]
    chunks = list(zip(sequences, splits, rest, strict=True))
    # The first sequence decodes while the others' prompts are computed.
    note([*order[1:]], rest[1:], steps.step(prefill=chunks[1:]))
    note([0], rest[:1], steps.step(prefill=chunks[:1]))
    note(order, [1] * len(sequences), steps.step(decode=sequences))
    return [torch.cat(it) for it in found]


def expected(models, sequences, order, dtype=torch.float32):
    with torch.inference_mode():
        return [
            models[at].to(dtype)(torch.tensor([it.token_ids])).logits[0].to(dtype)
            for it, at in zip(sequences, order, strict=True)
        ]


@pytest.mark.parametrize("case", FAMILIES)
def test_sequences_with_and_without_adapters_are_computed_as_by_peft(case, tmp_path):
    config, folders, models = checkpoint(CASES[case], tmp_path, FAMILIES[case])
    model = load_model(tmp_path / "base", config, torch.float32, "cpu")
    write_adapters(model, config, folders, 64)
    steps = AdaptedSteps(model)
    slots = (1, -1, 0, 2, 1)
    sequences = [steps.sequence(tokens(20 + i, i), slot) for i, slot in enumerate(slots)]

    found = computed(steps, sequences, [7, 2, 11, 5, 3])

    truths = expected(models, sequences, slots, torch.float64)
    for logits, plain, truth in zip(found, expected(models, sequences, slots), truths, strict=True):
        assert_no_worse_than(logits, truth, plain, factor=4.0, atol=2e-4)


@pytest.mark.parametrize("pack", [True, False], ids=["", "not packed"])
@pytest.mark.parametrize("case", HYBRIDS)
def test_hybrids_with_and_without_adapters_are_computed_as_by_peft(case, pack, tmp_path):
    adapters = [(1, ALL_LINEAR), (8, ALL_LINEAR), *((4, it) for it in HYBRIDS[case])]
    config, folders, models = checkpoint_with(CASES[case], tmp_path, adapters)
    model = load_model(tmp_path / "base", config, torch.float32, "cpu", pack=pack)
    write_adapters(model, config, folders, 8)
    steps = AdaptedSteps(model)
    slots = (1, -1, 0, 2, 1, 3)
    sequences = [steps.sequence(tokens(20 + i, i), slot) for i, slot in enumerate(slots)]

    found = computed(steps, sequences, [7, 2, 11, 5, 3, 16])

    truths = expected(models, sequences, slots, torch.float64)
    for logits, plain, truth in zip(found, expected(models, sequences, slots), truths, strict=True):
        assert_no_worse_than(logits, truth, plain, factor=4.0, atol=2e-4)


def test_layers_and_matrices_that_an_adapter_leaves_out_stay_those_of_the_model(tmp_path):
    plain = CASES["llama"].save(tmp_path / "base")
    one_layer = adapted(copy.deepcopy(plain), tmp_path / "one", 4, layers_to_transform=[1])
    some = adapted(copy.deepcopy(plain), tmp_path / "some", 4, ["k_proj", "up_proj"], seed=1)
    full = adapted(copy.deepcopy(plain), tmp_path / "all", 8, seed=2)
    config = ModelConfig.from_folder(tmp_path / "base")
    model = load_model(tmp_path / "base", config, torch.float32, "cpu")
    # The slots had an adapter of all matrices before.
    write_adapters(model, config, [tmp_path / "all"] * 2, 8)
    for slot, name in enumerate(("one", "some")):
        write_adapter(model, config, tmp_path / name, slot)
    steps, models, slots = AdaptedSteps(model), [one_layer, some, full], (0, 1, -1)
    models[-1] = plain.eval()
    sequences = [steps.sequence(tokens(20 + i, i), slot) for i, slot in enumerate(slots)]

    found = computed(steps, sequences, [7, 2, 11])

    truths = expected(models, sequences, range(3), torch.float64)
    pairs = zip(found, expected(models, sequences, range(3)), truths, strict=True)
    for logits, of_peft, truth in pairs:
        assert_no_worse_than(logits, truth, of_peft, factor=4.0, atol=2e-4)


def test_a_draft_is_computed_with_the_adapter_of_its_row(tmp_path):
    config, folders, models = checkpoint(CASES["llama"], tmp_path, ranks=(8,))
    model = load_model(tmp_path / "base", config, torch.float32, "cpu")
    write_adapters(model, config, folders, 8)
    steps, ids = AdaptedSteps(model), tokens(12, 0)
    with_adapter, without = steps.sequence(ids[:9], 0), steps.sequence(ids[:9])
    steps.step(prefill=[(with_adapter, 0, 8), (without, 0, 8)])

    logits = steps.step(decode=[(with_adapter, tuple(ids[9:])), without])

    whole = torch.tensor([ids])
    with torch.inference_mode():
        truth = models[0](whole).logits[0, 8:], models[1](whole).logits[0, 8:9]
    torch.testing.assert_close(logits, torch.cat(truth), rtol=1e-3, atol=1e-3)


def test_an_adapter_that_replaces_another_leaves_nothing_of_it(tmp_path):
    config, folders, models = checkpoint(CASES["llama"], tmp_path, ranks=(64,))
    adapted(copy.deepcopy(models[-1]), tmp_path / "small", 2, ["v_proj"])
    logits = []
    for order in ([tmp_path / "small"], [*folders, tmp_path / "small"]):
        model = load_model(tmp_path / "base", config, torch.float32, "cpu")
        model.reserve_adapters(1, 64)
        for folder in order:
            write_adapter(model, config, folder, 0)
        steps = AdaptedSteps(model)
        logits.append(steps.step(prefill=[(steps.sequence(tokens(9, 3), 0), 0, 9)]))

    assert torch.equal(*logits)


def test_a_step_without_adapters_has_the_bits_of_a_model_without_slots(tmp_path):
    config, folders, _ = checkpoint(CASES["llama"], tmp_path, ranks=(8,))
    logits = []
    for has_slots in (False, True):
        model = load_model(tmp_path / "base", config, torch.float32, "cpu")
        if has_slots:
            write_adapters(model, config, folders, 8)
        steps = AdaptedSteps(model)
        logits.append(steps.step(prefill=[(steps.sequence(tokens(9, 3)), 0, 9)]))

    assert torch.equal(*logits)


def library_model(folder, config):
    model = load_model(folder / "base", config, torch.float32, "cpu", pack=False)
    model.optimize(INT8_GROUPS, 2)
    return model


@needs_library
@pytest.mark.parametrize("name", ["llama", "phi3"])
def test_the_c_library_adds_what_adapters_add(name, tmp_path):
    case = dataclasses.replace(CASES[name], changes=CASES[name].changes | SIZES)
    config, folders, models = checkpoint(case, tmp_path, FAMILIES[name])
    model = library_model(tmp_path, config)
    write_adapters(model, config, folders, 64)
    steps = AdaptedSteps(model)
    slots = (1, -1, 0, 2, 1)
    sequences = [steps.sequence(tokens(20 + i, i), slot) for i, slot in enumerate(slots)]

    found = computed(steps, sequences, [7, 2, 11, 5, 3])

    for logits, truth in zip(found, expected(models, sequences, slots), strict=True):
        # Weights and activations are rounded to 8 bits; without the adapters' results the error is 0.6 and more.
        assert (logits - truth).norm() < 0.08 * truth.norm()


def copy_rounded(rounded, model):
    """Give a model the numbers of one whose matrices are rounded."""
    with torch.no_grad():
        for source, target in zip(rounded.decoder_layers, model.decoder_layers, strict=True):
            for name, matrix in source.matrices.items():
                target.matrices[name].numbers.copy_(matrix.dequantize())
        tables = zip((rounded.embedding, rounded.head), (model.embedding, model.head), strict=True)
        for source, target in tables:
            target.numbers.copy_(source.dequantize())


@needs_library
@pytest.mark.parametrize("case", [it for it in HYBRIDS if "biases" not in it])
def test_adapters_are_added_to_products_of_matrices_in_8_bits(case, tmp_path):
    adapters = [(1, ALL_LINEAR), (8, ALL_LINEAR), *((4, it) for it in HYBRIDS[case])]
    config, folders, _ = checkpoint_with(CASES[case], tmp_path, adapters)
    folder = tmp_path / "base"
    exact = load_model(folder, config, torch.float32, "cpu", pack=False)
    served = load_part(folder, config, torch.float32, "cpu", weight_format=INT8_GROUPS)
    copy_rounded(served, exact)
    served.optimize()
    assert not served.is_in_library
    logits = []
    for model in (served, exact):
        write_adapters(model, config, folders, 8)
        steps = AdaptedSteps(model)
        slots = (1, -1, 0, 2, 1, 3)
        sequences = [steps.sequence(tokens(20 + i, i), slot) for i, slot in enumerate(slots)]
        logits.append(computed(steps, sequences, [7, 2, 11, 5, 3, 16]))

    for found, truth in zip(*logits, strict=True):
        assert (found - truth).norm() < 1e-4 * truth.norm()


@needs_library
def test_in_the_c_library_a_row_has_the_same_bits_beside_any_other_adapters(tmp_path):
    case = dataclasses.replace(CASES["llama"], changes=SIZES)
    config, folders, _ = checkpoint(case, tmp_path)
    model = library_model(tmp_path, config)
    write_adapters(model, config, folders, 64)
    steps, ids = AdaptedSteps(model, 16), tokens(20, 0)
    alone = steps.step(prefill=[(steps.sequence(ids, 1), 0, 20)], deterministic=True)

    again = steps.sequence(ids, 1)
    rows = steps.step(prefill=[(again, 0, 19), (steps.sequence(ids[:7], 2), 0, 7)])
    assert torch.equal(rows[:19], alone[:19])
    last = steps.step(decode=[again, steps.sequence(ids[:1], 0), steps.sequence(ids[:1])])
    assert torch.equal(last[0], alone[19])


def test_executors_without_adapters_say_so(tmp_path):
    CASES["llama"].save(tmp_path / "base")
    config = ModelConfig.from_folder(tmp_path / "base")
    model = load_model(tmp_path / "base", config, torch.float32, "cpu")
    bucket = Bucket(rows=1, columns=1, num_logits=1, extra_columns=(ADAPTER,))
    problem = model.executors.problem(model.arch)
    refused = {it.name: it.unsupported(problem, bucket) for it in EXECUTORS}

    assert "no adapter of sequences" in refused["single_launch"]
    assert "no adapter of sequences" in refused["modules"]
    assert refused["layers"] == ()
    parallel = dataclasses.replace(problem, num_ranks=2)
    layers = next(it for it in EXECUTORS if it.name == "layers")
    assert layers.unsupported(parallel, bucket) == ()

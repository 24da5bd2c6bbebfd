import pytest
import torch

from kernels import Phase
from kernels.linear.cpu.packed import unsupported as packing_unsupported
from model.decoder import DecoderLM
from model.network.spec import Rotary
from tests.model.configs import changed, model_config
from tests.model.executors.paged import PagedDriver, logits_in_chunks

CONFIG = model_config(
    architecture="Qwen3ForCausalLM",
    vocab_size=64,
    hidden_size=32,
    intermediate_size=48,
    num_layers=3,
    num_heads=6,
    num_kv_heads=2,
    head_dim=16,
    max_position_embeddings=256,
    qk_norm=True,
    sliding_window=12,
    layer_types=("full_attention", "sliding_attention", "sliding_attention"),
    tie_word_embeddings=True,
)


def build(config=CONFIG, dtype=torch.float32):
    model = DecoderLM(config, dtype)
    model.init_weights(std=0.2, seed=0)
    return model


@pytest.fixture(scope="module")
def model():
    return build().requires_grad_(requires_grad=False)


def tokens(length, seed=0):
    return torch.randint(64, (length,), generator=torch.Generator().manual_seed(seed)).tolist()


def dense_logits(model, ids):
    with torch.inference_mode():
        return model.logits(model(torch.tensor([ids]), torch.arange(len(ids))))[0]


@pytest.mark.parametrize("chunk", [1, 2, 3, 4, 5, 7, 8, 50])
def test_logits_do_not_depend_on_the_chunk_size(model, chunk):
    ids = tokens(50)

    torch.testing.assert_close(
        logits_in_chunks(model, ids, chunk), dense_logits(model, ids), rtol=1e-4, atol=1e-4
    )


def test_logits_do_not_depend_on_other_sequences_of_the_step(model):
    sequences = {name: tokens(length, seed=name) for name, length in enumerate((5, 17, 30, 9))}
    driver = PagedDriver(model)
    fed = dict.fromkeys(sequences, 0)
    got = {name: [] for name in sequences}
    step = 0
    while any(fed[name] < len(ids) for name, ids in sequences.items()):
        # Every step mixes decode rows (one token) with longer prefill chunks.
        chunks = {
            name: ids[fed[name] : fed[name] + 1 + (name + step) % 4]
            for name, ids in sequences.items()
            if fed[name] < len(ids)
        }
        for name, logits in driver.step(chunks).items():
            got[name].append(logits)
            fed[name] += len(chunks[name])
        step += 1

    for name, ids in sequences.items():
        torch.testing.assert_close(
            torch.cat(got[name]), dense_logits(model, ids), rtol=1e-4, atol=1e-4
        )


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "untied"])
@pytest.mark.parametrize("round_to", [torch.float32, torch.bfloat16])
def test_packing_does_not_change_the_logits(tied, round_to):
    model, packed = (
        build(changed(CONFIG, tie_word_embeddings=tied)).to(round_to).float() for _ in range(2)
    )
    packed.requires_grad_(requires_grad=False).optimize()
    ids = tokens(30)

    exact = dense_logits(model, ids)

    assert packed.is_packed == (not packing_unsupported("float32"))
    for ours in (logits_in_chunks(packed, ids, 7), dense_logits(packed, ids)):
        torch.testing.assert_close(ours, exact, rtol=1e-4, atol=1e-4)


def test_packing_frees_the_original_matrices():
    model = build().requires_grad_(requires_grad=False)

    model.optimize()

    left = sum(p.numel() for p in model.parameters() if p.ndim > 1)
    assert left == (64 * 32 if model.is_packed else CONFIG.network.num_parameters)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_is_close_to_single_precision(model, dtype):
    half = build(dtype=dtype).requires_grad_(requires_grad=False)
    # Random numbers of a seed in another dtype differ between PyTorch versions.
    half.load_state_dict(model.state_dict())
    half.optimize()
    ids = tokens(30)

    ours, exact = logits_in_chunks(half, ids, 7).float(), dense_logits(model, ids)

    assert (ours - exact).abs().max() <= 0.05 * exact.abs().max()


def test_every_parameter_gets_a_gradient():
    model = build()

    hidden = model(torch.tensor([tokens(20), tokens(20, seed=1)]), torch.arange(20))
    model.logits(hidden).logsumexp(-1).mean().backward()

    assert hidden.shape == (2, 20, 32)
    assert all(p.grad is not None and p.grad.any() for p in model.parameters())


def test_the_dense_path_compiles_to_one_graph():
    model = build()
    ids, positions = torch.tensor([tokens(20)]), torch.arange(20)

    compiled = torch.compile(model, fullgraph=True, backend="eager")

    torch.testing.assert_close(compiled(ids, positions), model(ids, positions))


def test_a_model_that_mixes_layer_kinds_has_plans_for_both(model):
    full, sliding = (model.attention.problem(it, Phase.DECODE, 16) for it in model.attention.mixers)

    assert (full.sliding_window, sliding.sliding_window) == (None, 12)


def test_a_model_with_only_sliding_layers_has_one_attention_problem_per_phase():
    config = changed(CONFIG, layer_types=("sliding_attention",) * 3)
    sliding = DecoderLM(config)

    (mixer,) = sliding.attention.mixers
    assert sliding.attention.problem(mixer, Phase.PREFILL, 16).sliding_window == 12


def test_initial_weights_are_determined_by_the_seed():
    first, second = build(), build()

    assert torch.equal(first.layers[0].qkv.numbers, second.layers[0].qkv.numbers)
    assert first.layers[0].qkv.numbers.std().item() == pytest.approx(0.2, rel=0.1)
    assert torch.equal(first.norm, torch.ones(32))


def test_a_tied_head_is_the_embedding():
    names = [name for name, _ in build().named_parameters()]

    assert "lm_head" not in names


def dynamic(max_positions=16, factor=2.0):
    rope = Rotary("dynamic", 10_000.0, factor, max_positions)
    return changed(CONFIG, rope=rope, max_position_embeddings=max_positions)


def test_a_dynamic_rotation_depends_only_on_the_position_in_serving():
    model = build(dynamic(factor=8.0)).requires_grad_(requires_grad=False)
    ids = tokens(60)

    at_once, one_by_one = logits_in_chunks(model, ids, 60), logits_in_chunks(model, ids, 1)

    torch.testing.assert_close(at_once, one_by_one, rtol=1e-4, atol=1e-4)


def test_the_rotary_table_grows_without_changing_its_rows():
    rope = build(dynamic()).ropes[0]
    positions = torch.tensor([0, 15, 16, 40])
    rope.reserve(41, torch.float32, torch.device("cpu"))
    before = [table[positions] for table in rope.tables]

    rope.reserve(40_000, torch.float32, torch.device("cpu"))

    for old, new in zip(before, [table[positions] for table in rope.tables], strict=True):
        assert torch.equal(old, new)


def test_rotations_of_large_positions_have_float32_precision_in_a_half_precision_model():
    rope = build(changed(CONFIG, max_position_embeddings=100_000)).ropes[0]
    rope.reserve(100_000, torch.bfloat16, torch.device("cpu"))
    position = torch.tensor([99_999])

    cos, _ = [table[position] for table in rope.tables]

    assert cos[0, 0, 0] == torch.tensor(99_999.0).cos().bfloat16()

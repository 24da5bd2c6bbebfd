"""Embeddings and heads of quantized checkpoints: held as they are stored, and the memory that loading takes."""

import json

import pytest
import safetensors.torch
import torch
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils import _pytree as pytree
from torch.utils._python_dispatch import TorchDispatchMode

from benchmarks.precision import ServedModel
from kernels.cpu.library import load as load_library
from kernels.weight_format import INT8_GROUPS
from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model, load_part
from model.executors.layers import binder
from model.network.parameters import TABLES
from tests.model.checkpoint.packed_checkpoints import FILE
from tests.model.executors.paged import greedy, logits_in_chunks
from tests.model.gguf.written import write
from tests.model.network.ranks import ThreadRanks

IDS = [(7 * i) % 300 + 2 for i in range(60)]
TIED = {"tie_word_embeddings": True}
OTHERS = {"token_embd.weight": "Q8_0", "output.weight": "Q6_K"}


@pytest.fixture
def library():
    if isinstance(reason := load_library(), str):
        pytest.skip(reason)


def load(path, dtype=torch.float32, *, kept=True, **options):
    config = ModelConfig.from_folder(path)
    form = config.stored_format if kept else None
    return load_model(path, config, dtype, "cpu", weight_format=form, **options)


def tables(model):
    return {name: getattr(model, name) for name in TABLES if getattr(model, name) is not None}


def served_logits(model, form):
    served = ServedModel(model, form)
    with torch.inference_mode():
        return served(torch.tensor([IDS]), torch.arange(len(IDS)))[0]


@pytest.mark.parametrize("kind", ["Q8_0", "Q6_K", "Q4_K", "Q4_0", "Q5_1", "Q2_K", "Q3_K"])
@pytest.mark.parametrize("changes", [{}, TIED], ids=["two tables", "tied"])
def test_the_c_library_multiplies_a_head_by_the_numbers_of_the_file(
    tmp_path, library, kind, changes
):
    file = tmp_path / "model.gguf"
    write(file, "llama", lambda name: kind if name in OTHERS else "Q4_0", **changes)
    exact = logits_in_chunks(load(file, kept=False, pack=False), IDS, 60)
    model, full = load(file, pack=False), load(file, pack=False)
    for name, table in tables(full).items():
        values = torch.nn.Parameter(table.weight.dequantize(), requires_grad=False)
        setattr(full, name, values)
    form, tables_held = model.weight_format, len(tables(model))

    own = served_logits(model, form)
    rounded = served_logits(full, form)

    assert tables_held == (1 if changes else 2)
    assert (own - exact).norm() < 0.06 * exact.norm()
    # Activations are rounded in both. 8 bits of the table itself are exact here, or finer than its own.
    assert (own - exact).norm() < 1.1 * (rounded - exact).norm()
    # The library has numbers with groups of 16 inputs, as those of Q2_K and Q3_K, in 8 bits.
    of_4_bits = kind in ("Q4_0", "Q4_K")
    bytes_of = [it.executors.cpu_library._decoder.num_bytes for it in (model, full)]
    assert (bytes_of[0] < bytes_of[1]) == of_4_bits


@pytest.mark.parametrize("setting", ["int8", "int4"])
def test_a_setting_rounds_no_table_that_is_stored_in_8_bits(tmp_path, library, setting):
    file = tmp_path / "model.gguf"
    write(file, "llama", lambda name: OTHERS.get(name, "Q8_0"))
    model = load(file, pack=False)

    served_logits(model, setting)

    head, embedding = model.executors.cpu_library._decoder._held[2:]
    assert (head.format.name, embedding.format.name) == ("Q6_K", "Q8_0")


class Allocated(TorchDispatchMode):
    """Counts the bytes of the tensors that exist at once, those of mapped files left out.

    Attributes:
        peak: the most so far.
    """

    def __init__(self):
        super().__init__()
        self.peak, self._seen = 0, {}

    def __torch_dispatch__(self, function, _types, given=(), named=None):
        made = function(*given, **(named or {}))
        before = {_storage(it) for it in pytree.tree_leaves((given, named)) if _is_held(it)}
        for it in pytree.tree_leaves(made):
            if _is_held(it) and _storage(it) not in before:
                storage = it.untyped_storage()
                self._seen[_storage(it)] = StorageWeakRef(storage), storage.nbytes()
        self._seen = {at: it for at, it in self._seen.items() if not it[0].expired()}
        self.peak = max(self.peak, sum(num_bytes for _, num_bytes in self._seen.values()))
        return made


def _is_held(it):
    return isinstance(it, torch.Tensor) and not it.is_meta


def _storage(it):
    return it.untyped_storage()._cdata


def awq_checkpoint(folder, dtype, *, tied, hidden=128, layers=8, vocab=12_288):
    """Save a random checkpoint, in which tables take as large a part as in one of 4 billion parameters."""
    inner = 4 * hidden
    tables = ["model.embed_tokens", *(() if tied else ("lm_head",))]
    tensors = {f"{it}.weight": torch.randn(vocab, hidden).to(dtype) for it in tables}
    tensors["model.norm.weight"] = torch.ones(hidden, dtype=dtype)
    shapes = {
        **{f"self_attn.{it}_proj": (hidden, hidden) for it in "qkvo"},
        "mlp.gate_proj": (inner, hidden), "mlp.up_proj": (inner, hidden), "mlp.down_proj": (hidden, inner),
    }  # fmt: skip
    for layer in range(layers):
        prefix = f"model.layers.{layer}."
        for name in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{prefix}{name}.weight"] = torch.ones(hidden, dtype=dtype)
        for name, (outputs, inputs) in shapes.items():
            words = torch.randint(-(2**31), 2**31, (inputs + inputs // 64, outputs // 8))
            numbers, zeros = words.int().split((inputs, inputs // 64))
            tensors[f"{prefix}{name}.qweight"] = numbers.contiguous()
            tensors[f"{prefix}{name}.qzeros"] = zeros.contiguous()
            scales = torch.full((inputs // 64, outputs), 0.005, dtype=torch.float16)
            tensors[f"{prefix}{name}.scales"] = scales
    config = {
        "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": hidden,
        "intermediate_size": inner, "num_hidden_layers": layers, "num_attention_heads": 4, "vocab_size": vocab,
        "max_position_embeddings": 64, "tie_word_embeddings": tied, "torch_dtype": str(dtype)[6:],
        "quantization_config": {
            "quant_method": "awq", "bits": 4, "group_size": 64, "zero_point": True, "version": "gemm",
        },
    }  # fmt: skip
    (folder / "config.json").write_text(json.dumps(config))
    safetensors.torch.save_file(tensors, folder / FILE)
    return (folder / FILE).stat().st_size


@pytest.mark.parametrize("tied", [True, False], ids=["tied", "two tables"])
@pytest.mark.parametrize(
    ("stored", "dtype"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.bfloat16)],
    ids=["float16 computed in float32", "bfloat16"],
)
def test_loading_takes_at_most_1_3_times_the_files_on_a_cpu(tmp_path, stored, dtype, tied):
    size = awq_checkpoint(tmp_path, stored, tied=tied)

    with Allocated() as allocated:
        model = load(tmp_path, dtype)

    assert 0.9 * size < model.weight_bytes <= allocated.peak < 1.3 * size
    assert {it.weight.format.name for it in tables(model).values()} == {str(stored)[6:]}


def test_packing_for_the_c_library_drops_the_pages_of_a_table_as_its_rows_are_packed(
    tmp_path, library, monkeypatch
):
    awq_checkpoint(tmp_path, torch.float16, tied=False, layers=1, vocab=4096)
    model, dropped = load(tmp_path, torch.float16, pack=False), []
    places = [it.weight.numbers.data_ptr() for it in tables(model).values()]
    monkeypatch.setattr(
        "model.executors.cpu_library.drop_pages",
        lambda rows: dropped.append((rows.data_ptr(), rows.nbytes)),
    )

    model.optimize(INT8_GROUPS)

    embedding, head = (
        [(place - first, size) for place, size in dropped if 0 <= place - first < 2**20]
        for first in places
    )
    assert embedding == head == [(start, 2**17) for start in range(0, 2**20, 2**17)]


def test_a_rank_has_its_rows_of_a_quantized_head_and_the_whole_embedding(tmp_path):
    file = tmp_path / "model.gguf"
    write(file, "llama", lambda name: OTHERS.get(name, "Q4_0"), vocab_size=321)
    config, whole = ModelConfig.from_folder(file), load(file, pack=False)

    def compute(communicator):
        part = load_part(
            file, config, torch.float32, "cpu", weight_format=config.stored_format,
            communicator=communicator,
        )  # fmt: skip
        part.optimize()
        return part.head, part.embedding, *greedy(part, IDS[:9], 12)

    for rank, (head, embedding, tokens, _) in enumerate(ThreadRanks(2).run(compute)):
        assert head.format == whole.head.format
        start = (0, 160)[rank]
        assert torch.equal(head.numbers, whole.head.numbers[start : start + 161])
        assert torch.equal(embedding.numbers, whole.embedding.numbers)
        assert tokens == greedy(whole, IDS[:9], 12)[0]


def test_gpus_get_full_numbers_of_tables_and_the_log_says_so(tmp_path, caplog):
    file = tmp_path / "model.gguf"
    write(file, "llama", lambda name: OTHERS.get(name, "Q4_0"))
    config = ModelConfig.from_folder(file)

    with caplog.at_level("INFO"):
        model = load_part(file, config, torch.bfloat16, "meta", weight_format=config.stored_format)

    assert {type(it) for it in tables(model).values()} == {torch.nn.Parameter}
    assert "full numbers, as kernels for GPUs read them: embed_tokens, lm_head" in caplog.text


def test_matrices_of_which_products_have_copies_are_dropped_layer_by_layer(tmp_path, monkeypatch):
    file = tmp_path / "model.gguf"
    write(file, "llama", "F32")
    model, left = load(file, kept=False, pack=False), []
    bind = binder.bind_projection

    def bound(*given, **options):
        left.append(sum(len(it.matrices) for it in model.decoder_layers))
        return bind(*given, **options)

    monkeypatch.setattr(binder, "bind_projection", bound)
    model.optimize()

    assert left == [8] * 4 + [4] * 4
    assert not any(it.matrices for it in model.decoder_layers)
    assert model.lm_head is None

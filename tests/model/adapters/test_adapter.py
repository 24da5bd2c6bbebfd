"""Adapters are checked against the model before anything uses them, and what is not computed is refused by name."""

import json
import math

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

from model.adapters.adapter import AdapterReader, find_adapter_folder
from model.adapters.config import AdapterConfig
from model.checkpoint.config import ModelConfig
from model.errors import AdapterError, ModelError
from model.files import read_file
from tests.model.adapters.peft_adapters import adapted
from tests.model.checkpoint.hf_checkpoints import CASES

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
Q = "base_model.model.model.layers.0.self_attn.q_proj.lora_{}.weight"


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    folder = tmp_path_factory.mktemp("saved")
    model = CASES["llama"].save(folder / "base")
    adapted(
        model,
        folder / "adapter",
        8,
        rank_pattern={"v_proj": 4},
        alpha_pattern={"layers.1.mlp.down_proj": 5, "^model.layers.0.self_attn.k_proj": 3},
    )
    return folder


@pytest.fixture
def adapter(saved, tmp_path):
    """A copy of the adapter, which tests change."""
    folder = tmp_path / "adapter"
    folder.mkdir()
    for name in (CONFIG, WEIGHTS):
        (folder / name).write_bytes((saved / "adapter" / name).read_bytes())
    return folder


@pytest.fixture(scope="module")
def reader(saved):
    return AdapterReader(ModelConfig.from_folder(saved / "base"), 16)


def change(folder, **fields):
    file = folder / CONFIG
    file.write_text(json.dumps(json.loads(file.read_text()) | fields))


def change_tensors(folder, edit):
    tensors = load_file(folder / WEIGHTS)
    edit(tensors)
    save_file(tensors, folder / WEIGHTS)


def test_ranks_and_scales_follow_the_patterns(reader, adapter):
    modules = reader.read(adapter).modules

    assert len(modules) == 14
    found = {
        name.removeprefix("model.layers."): (it.rank, it.scale) for name, it in modules.items()
    }
    assert found["0.self_attn.q_proj"] == (8, 2.0)
    assert found["0.self_attn.v_proj"] == (4, 4.0)
    assert found["0.self_attn.k_proj"] == (8, 3 / 8)
    assert found["1.self_attn.k_proj"] == (8, 2.0)
    assert found["1.mlp.down_proj"] == (8, 5 / 8)


def test_the_first_of_several_patterns_counts():
    fields = {"peft_type": "LORA", "r": 2, "lora_alpha": 2}
    patterns = {
        r"layers\.[01]\.mlp\.(up|down)_proj": 4,
        "up_proj": 6,
        "0.mlp.up_proj": 8,
        ".*v_proj": 10,
    }
    config = AdapterConfig(fields | {"alpha_pattern": patterns})

    names = (
        "model.layers.0.mlp.up_proj",
        "model.layers.2.mlp.up_proj",
        "x.v_proj",
        "x.up_projection",
    )
    assert [config.scale(it) for it in names] == [2.0, 3.0, 5.0, 1.0]


def test_rslora_divides_by_the_root_of_the_rank():
    fields = {"peft_type": "LORA", "r": 16, "lora_alpha": 8, "use_rslora": True}
    assert AdapterConfig(fields).scale("q_proj") == 2.0


def test_layers_that_an_adapter_leaves_out_have_no_tensors(reader, adapter):
    change(adapter, layers_to_transform=1)
    with pytest.raises(AdapterError, match=r"layers\.0.* is in a layer that layers_to_transform"):
        reader.read(adapter)

    def drop(tensors):
        for name in [it for it in tensors if ".layers.0." in it]:
            del tensors[name]

    change_tensors(adapter, drop)
    modules = reader.read(adapter).modules
    assert {it.target.layer for it in modules.values()} == {1}
    for layers in ([], [0, 1], None):
        change(adapter, layers_to_transform=layers)
        assert reader.read(adapter).modules == modules, "a layer without tensors stays as it is"


def test_a_digest_is_that_of_both_files(reader, adapter):
    first = reader.read(adapter).digest
    assert reader.read(adapter).digest == first
    change(adapter, lora_alpha=17)
    assert reader.read(adapter).digest != first


@pytest.mark.parametrize(
    ("fields", "error"),
    [
        ({"peft_type": "LOHA"}, "peft_type = 'LOHA' is not supported"),
        ({"task_type": "SEQ_CLS"}, "task_type = 'SEQ_CLS'"),
        ({"bias": "all"}, "biases of the model would change"),
        ({"use_dora": True}, "'use_dora' = True is not supported: DoRA"),
        ({"modules_to_save": ["lm_head"]}, "'modules_to_save'.*whole modules"),
        ({"init_lora_weights": "pissa_niter_4"}, "belongs to a model whose weights that changed"),
        ({"layers_to_transform": [0, 2]}, "layers_to_transform has 2; the model has layers 0 to 1"),
        ({"layers_to_transform": "0"}, "layers_to_transform has '0'"),
        ({"r": 0}, "r must be .*>= 1, found 0"),
        ({"r": 257}, "r must be .*<= 256, found 257"),
        ({"r": 16}, r"is \[8, \d+\], must be \[16, \d+\] by the model and adapter_config.json"),
        ({"r": 32}, "has rank 32, more than --max-lora-rank 16"),
        ({"lora_alpha": "8"}, "lora_alpha must be a number"),
        ({"alpha_pattern": {"(a+)+b": 1}}, r"the pattern '\(a\+\)\+b' is not supported"),
        ({"alpha_pattern": {".*.*.*q": 1}}, "is not supported: give names of modules"),
        ({"rank_pattern": {"[z-a]": 4}}, r"the pattern '\[z-a\]' is no regular expression: bad character range z-a"),
        ({"alpha_pattern": {"[a--z]": 1}}, r"the pattern '\[a--z\]' is not supported"),
        ({"rank_pattern": {f"x{i}.*": 1 for i in range(17)}}, "has 17 regular expressions, more than 16"),
        ({"alpha_pattern": {f"x{i}": 1 for i in range(4097)}}, "alpha_pattern has 4097 entries, more than 4096"),
        ({"alpha_pattern": {"x": "8"}}, r"alpha_pattern\['x'\] must be a number, found '8'"),
        ({"alpha_pattern": {"x": float("nan")}}, r"alpha_pattern\['x'\] must be .*found nan"),
        ({"rank_pattern": {"x": 0}}, r"rank_pattern\['x'\] must be .*>= 1, found 0"),
        ({"rank_pattern": [1]}, "rank_pattern must be an object"),
        ({"use_new_idea": 3}, "'use_new_idea' = 3 is not supported: this key is not known"),
    ],
)  # fmt: skip
def test_what_is_not_computed_is_refused_by_its_key(reader, adapter, fields, error):
    change(adapter, **fields)
    with pytest.raises(AdapterError, match=error):
        reader.read(adapter)


def test_keys_without_effect_and_unknown_ones_that_are_off_are_accepted(reader, adapter):
    change(adapter, lora_dropout=0.5, use_new_idea=False, new_config=None, peft_version="9")
    assert reader.read(adapter).rank == 8


def _renamed(old, new):
    def edit(tensors):
        tensors[new] = tensors.pop(old)

    return edit


def _with(name, tensor):
    return lambda tensors: tensors.update({name: tensor})


@pytest.mark.parametrize(
    ("edit", "error"),
    [
        (_renamed(Q.format("B"), "x"), "'x' is not supported; adapters may change q_proj, k_proj"),
        (lambda it: it.pop(Q.format("B")), "model.layers.0.self_attn.q_proj has no lora_B"),
        (_renamed(Q.format("B"), Q.format("B").replace("q_proj", "w_proj")), "w_proj' cannot have"),
        (_with(Q.format("B").replace("layers.0", "layers.7"), torch.ones(1, 1)), "layers 0 to 1"),
        (_with(Q.format("A").replace("weight", "default.weight"), torch.ones(1)), "the same matrix"),
        (_with(Q.format("A"), torch.ones(8, 65)), r"is \[8, 65\], must be \[8, 64\]"),
        (_with(Q.format("A"), torch.full((8, 64), torch.inf)), "numbers that are not finite"),
        (_with(Q.format("A"), torch.full((8, 64), torch.nan).half()), "numbers that are not finite"),
        (_with(Q.format("A"), torch.ones(8, 64, dtype=torch.float64)), "is stored as 'F64'"),
        (_with("base_model.model.lm_head.lora_A.weight", torch.ones(8, 64)), "the head is that"),
        (_with("base_model.model.model.embed_tokens.lora_embedding_A", torch.ones(1)), "embeddings"),
        (_with(Q.replace("lora_{}.weight", "lora_magnitude_vector"), torch.ones(64)), "DoRA"),
        (dict.clear, "it has no tensors"),
    ],
)  # fmt: skip
def test_tensors_that_do_not_fit_are_refused_by_name(reader, adapter, edit, error):
    change_tensors(adapter, edit)
    with pytest.raises(AdapterError, match=error):
        reader.read(adapter)


@pytest.mark.parametrize(
    ("case", "module", "rank"),
    [("lfm2", "conv.conv", 64), ("qwen3.5", "conv1d", 112), ("granite4", "conv1d", 160)],
)
def test_an_adapter_of_a_convolution_is_refused_by_name(case, module, rank, tmp_path):
    model = CASES[case].save(tmp_path / "base")
    with pytest.warns(UserWarning, match="Merging is not supported"):
        adapted(model, tmp_path / "adapter", rank, [module])
    reader = AdapterReader(ModelConfig.from_folder(tmp_path / "base"), 256)

    error = rf"layers\.0\..*{module}' cannot have an adapter: convolutions are those of the model"
    with pytest.raises(AdapterError, match=error):
        reader.read(tmp_path / "adapter")


def test_other_parameters_of_recurrent_layers_are_refused_by_name(tmp_path):
    model = CASES["granite4"].save(tmp_path / "base")
    adapted(model, tmp_path / "adapter", 8, ["mamba.in_proj"])
    reader = AdapterReader(ModelConfig.from_folder(tmp_path / "base"), 8)
    name = "base_model.model.model.layers.0.mamba.in_proj.lora_A.weight"
    other = name.replace("in_proj", "dt_bias")

    change_tensors(tmp_path / "adapter", _renamed(name, other))
    error = "mamba.dt_bias' cannot have an adapter; adapters may change in_proj, out_proj, "
    with pytest.raises(AdapterError, match=error):
        reader.read(tmp_path / "adapter")


@pytest.mark.parametrize("cut", [0, 7, 100, -1])
def test_a_truncated_file_is_refused(reader, adapter, cut):
    file = adapter / WEIGHTS
    file.write_bytes(file.read_bytes()[:cut])
    with pytest.raises(AdapterError, match="no valid safetensors file"):
        reader.read(adapter)


@pytest.mark.parametrize(
    "offsets", [[0, 8], [-4, 0], [4, 8], [0, 4.0], ["0", "4"], [0, 1 << 60]], ids=str
)
def test_a_header_that_contradicts_itself_is_refused(reader, adapter, offsets):
    header = json.dumps({"x": {"dtype": "F32", "shape": [1], "data_offsets": offsets}}).encode()
    content = len(header).to_bytes(8, "little") + header + bytes(4)
    (adapter / WEIGHTS).write_bytes(content)
    with pytest.raises(AdapterError, match="no valid safetensors file"):
        reader.read(adapter)


def test_the_digest_is_that_of_what_was_checked(reader, adapter, monkeypatch):
    expected = reader.read(adapter)
    names = []

    def read(folder, name, *arguments):
        content = read_file(folder, name, *arguments)
        names.append(name)
        change(adapter, lora_alpha=100 + len(names))
        return content

    monkeypatch.setattr("model.adapters.adapter.read_file", read)
    monkeypatch.setattr("model.adapters.file.read_file", read)
    found = reader.read(adapter)

    assert names == [CONFIG, WEIGHTS]
    assert (found.digest, found.modules) == (expected.digest, expected.modules)


def test_a_file_that_is_larger_than_any_adapter_of_the_model_is_not_read(reader, adapter):
    with (adapter / WEIGHTS).open("r+b") as file:
        file.truncate(1 << 30)
    with pytest.raises(AdapterError, match=r"at most \d+ are read"):
        reader.read(adapter)


def test_pickles_are_not_read(reader, adapter):
    (adapter / WEIGHTS).rename(adapter / "adapter_model.bin")
    with pytest.raises(AdapterError, match="a pickle can run code"):
        reader.read(adapter)


def test_a_link_out_of_the_folder_is_not_followed(reader, adapter, tmp_path):
    (adapter / WEIGHTS).rename(tmp_path / "secret")
    (adapter / WEIGHTS).symlink_to(tmp_path / "secret")
    with pytest.raises(AdapterError, match="is not in the model's folder"):
        reader.read(adapter)


def test_names_of_tensors_may_have_other_prefixes(reader, adapter):
    def edit(tensors):
        for name in [*tensors]:
            short = name.removeprefix("base_model.model.model.")
            tensors[f"base_model.model.{short}"] = tensors.pop(name)

    change_tensors(adapter, edit)
    assert len(reader.read(adapter).modules) == 14


def test_a_folder_without_an_adapter_is_refused(tmp_path):
    with pytest.raises(ModelError, match=r"has no adapter_config\.json"):
        find_adapter_folder(str(tmp_path))


@pytest.mark.parametrize(
    ("path", "reason"),
    [
        ("~nosuchuser/adapter", "Could not determine home directory"),
        ("/" + "x" * 5000, "File name too long"),
        ("a/" * 5000, "File name too long"),
    ],
)
def test_a_path_that_leads_nowhere_is_refused_with_the_reason(path, reason):
    with pytest.raises(AdapterError, match=f"cannot be read: {reason}"):
        find_adapter_folder(path)


def test_a_folder_that_may_not_be_read_is_refused_with_the_reason(tmp_path, monkeypatch):
    def stat(*_, **__):
        raise PermissionError(13, "Permission denied")

    monkeypatch.setattr("pathlib.Path.stat", stat)
    with pytest.raises(AdapterError, match="cannot be read: Permission denied"):
        find_adapter_folder(str(tmp_path))


@settings(max_examples=150, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(st.data())
def test_a_damaged_file_gives_an_error_or_an_adapter_that_fits(reader, adapter, saved, data):
    """Damage of some bytes, of which most are in the header or in adapter_config.json."""
    name = data.draw(st.sampled_from((CONFIG, WEIGHTS)))
    content = bytearray((saved / "adapter" / name).read_bytes())
    for _ in range(data.draw(st.integers(1, 4))):
        at = data.draw(st.integers(0, min(len(content) - 1, 6000)))
        new = data.draw(st.binary(max_size=3) | st.sampled_from([b"[", b"{", b"9999999999", b"-1"]))
        content[at : at + data.draw(st.integers(0, 3))] = new
    (adapter / name).write_bytes(content)

    try:
        found = reader.read(adapter)
    except AdapterError:
        return
    finally:
        (adapter / name).write_bytes((saved / "adapter" / name).read_bytes())
    for module in found.modules.values():
        target = module.target
        assert found.file.read(module.a).shape == (module.rank, target.inputs)
        assert found.file.read(module.b).shape == (target.outputs, module.rank)
        assert module.rank <= 16
        assert math.isfinite(module.scale)

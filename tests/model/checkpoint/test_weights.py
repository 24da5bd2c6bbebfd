import json
import os
import struct

import pytest
import safetensors.torch
import torch
import transformers

from model.checkpoint.config import ModelConfig
from model.checkpoint.files.shards import read_headers, read_tensors
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from model.device.memory import drop_pages
from model.errors import WeightsError
from tests.model.checkpoint.hf_checkpoints import CASES

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"


@pytest.fixture
def single(tmp_path):
    CASES["llama"].save(tmp_path)
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    CASES["llama sharded"].save(tmp_path)
    return tmp_path


@pytest.fixture
def tied(tmp_path):
    CASES["llama tied"].save(tmp_path)
    return tmp_path


def load(folder, dtype=torch.float32, **options):
    return load_model(folder, ModelConfig.from_folder(folder), dtype, "cpu", **options)


def edit(folder, change):
    """Apply `change` to the dictionary of tensors and rewrite the file."""
    tensors = safetensors.torch.load_file(folder / SINGLE)
    change(tensors)
    safetensors.torch.save_file(tensors, folder / SINGLE)


def edit_index(folder, change):
    index = json.loads((folder / INDEX).read_text())
    change(index["weight_map"])
    (folder / INDEX).write_text(json.dumps(index))


def first_shard(folder):
    return min(folder.glob("model-00001-*.safetensors"))


SAVED = [
    "llama biases", "llama tied", "qwen2", "qwen3 tied biases", "gpt2", "opt", "gemma1 untied biases", "gemma2",
    "phi3 partial longrope tied", "smollm3", "stablelm biases tied", "olmo2 head_dim tied biases",
    "gpt_neox", "gptj", "phi", "cohere norms by head", "cohere2", "falcon few key-value heads biases", "gpt_bigcode",
    "exaone tied rope llama3", "ernie4.5 untied biases", "hunyuan alpha tied biases", "nemotron biases tied",
    "olmo3 yarn tied biases", "arcee", "qwen3.5 more value heads tied biases", "lfm2 untied biases",
]  # fmt: skip


@pytest.mark.parametrize("name", SAVED)
@pytest.mark.parametrize("shard_bytes", [2**40, 50_000], ids=["single", "sharded"])
def test_a_saved_checkpoint_equals_that_of_transformers(tmp_path, name, shard_bytes):
    oracle = CASES[name].save(tmp_path / "theirs")

    save_checkpoint(load(tmp_path / "theirs", pack=False), tmp_path / "ours", shard_bytes)

    again = type(oracle).from_pretrained(tmp_path / "ours")
    assert again.state_dict().keys() == oracle.state_dict().keys()
    for key, tensor in oracle.state_dict().items():
        # Weights of Gemma's norms are held plus 1.
        offset = name.startswith(("gemma", "nemotron", "qwen3.5")) and "norm" in key
        atol = 2**-23 if offset else 0.0
        torch.testing.assert_close(again.state_dict()[key], tensor, rtol=0.0, atol=atol, msg=key)
    assert (tmp_path / "ours" / INDEX).exists() == (shard_bytes == 50_000)


@pytest.mark.parametrize("name", ["gpt2", "opt", "llama tied"])
def test_names_without_that_of_the_base_model_are_read(tmp_path, name):
    oracle = CASES[name].save(tmp_path)
    base = oracle.base_model_prefix + "."

    def shorten(tensors):
        for full in list(tensors):
            tensors[full.removeprefix(base)] = tensors.pop(full)

    edit(tmp_path, shorten)

    model = load(tmp_path, pack=False)

    assert torch.equal(model.embed_tokens, oracle.get_input_embeddings().weight)


def test_a_stored_causal_mask_of_gpt2_is_ignored(tmp_path):
    CASES["gpt2"].save(tmp_path)
    edit(tmp_path, lambda it: it.update({"transformer.h.0.attn.bias": torch.zeros(1, 1, 4, 4)}))

    load(tmp_path)


def test_weights_of_gemmas_norms_are_held_plus_1_in_float32(tmp_path):
    oracle = CASES["gemma3"].save(tmp_path)

    model = load(tmp_path, torch.bfloat16)

    stored = oracle.model.layers[0].input_layernorm.weight
    assert torch.equal(model.layers[0].input_norm, 1 + stored)
    assert model.layers[0].q_norm.dtype is torch.float32
    assert model.embed_tokens.dtype is torch.bfloat16


def test_saving_over_a_checkpoint_removes_its_weights(single):
    model = load(single, pack=False)

    save_checkpoint(model, single, max_shard_bytes=50_000)

    assert not (single / SINGLE).exists()
    load(single)


def test_a_file_with_two_or_more_tensors_does_not_exceed_the_limit(single):
    save_checkpoint(load(single, pack=False), single, max_shard_bytes=50_000)

    for file in single.glob("*.safetensors"):
        tensors = safetensors.torch.load_file(file)
        assert len(tensors) == 1 or sum(t.nbytes for t in tensors.values()) <= 50_000


def test_weights_are_converted_to_the_requested_dtype(single):
    exact = load(single, pack=False)

    half = load(single, torch.bfloat16, pack=False)

    assert all(p.dtype is torch.bfloat16 for p in half.parameters())
    assert torch.equal(half.embed_tokens, exact.embed_tokens.bfloat16())


def test_a_loaded_model_is_frozen(single):
    assert not any(p.requires_grad for p in load(single).parameters())


def test_progress_ends_at_the_total_bytes(sharded):
    calls = []

    load(sharded, progress=lambda *progress: calls.append(progress))

    expected = sum(
        tensor.nbytes
        for file in sharded.glob("*.safetensors")
        for tensor in safetensors.torch.load_file(file).values()
    )
    shards = len(list(sharded.glob("*.safetensors")))
    assert calls[-1] == (expected, expected, shards, shards)
    assert calls == sorted(calls)
    assert {shard for _, _, shard, _ in calls} == {*range(1, shards + 1)}


def test_all_mismatches_are_reported_in_one_error(single):
    def change(tensors):
        del tensors["model.norm.weight"]
        tensors["model.layers.0.mlp.experts.weight"] = torch.zeros(1)
        tensors["lm_head.weight"] = torch.zeros(5, 64)

    edit(single, change)

    with pytest.raises(WeightsError) as raised:
        load(single)

    text = str(raised.value)
    assert "1 missing: model.norm.weight" in text
    assert "1 unexpected: model.layers.0.mlp.experts.weight" in text
    assert "1 wrongly shaped: lm_head.weight is [5, 64], must be [128, 64]" in text


@pytest.mark.slow
def test_a_long_list_of_names_is_shortened(single):
    config = json.loads((single / "config.json").read_text())
    (single / "config.json").write_text(json.dumps(config | {"num_hidden_layers": 900}))

    with pytest.raises(WeightsError, match=r"8082 missing: .* and 8074 more") as raised:
        load(single)

    assert len(str(raised.value)) < 1000


def test_a_tied_head_that_equals_the_embedding_is_ignored(tied, caplog):
    def change(tensors):
        tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].clone()

    edit(tied, change)

    model = load(tied)

    assert model.config.network.tied
    assert not warnings(caplog)


@pytest.mark.parametrize(
    "name", ["llama tied", "gpt2", "opt", "gemma3 multimodal", "granite tied biases"]
)
def test_a_stored_head_that_differs_from_the_tied_embedding_is_used(tmp_path, caplog, name):
    oracle = CASES[name].save(tmp_path)
    head = "lm_head.weight"
    stored = torch.randn(128, 64, generator=torch.Generator().manual_seed(7))
    edit(tmp_path, lambda tensors: tensors.update({head: stored}))

    model = load(tmp_path, pack=False)

    assert torch.equal(model.head.numbers, stored)
    assert torch.equal(model.embed_tokens, oracle.get_input_embeddings().weight)
    assert not model.config.network.tied
    (warning,) = warnings(caplog)
    assert warning.startswith(f"config.json ties {head} to ")
    theirs = type(oracle).from_pretrained(tmp_path)
    ids = torch.arange(1, 20)[None]
    with torch.inference_mode():
        expected = theirs(input_ids=ids).logits[0]
        found = model.logits(model(ids, torch.arange(19)))[0]
    torch.testing.assert_close(found, expected, rtol=1e-3, atol=1e-3 * float(expected.abs().max()))


def test_a_model_with_a_stored_head_is_saved_with_it(tied, tmp_path_factory):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": torch.randn(128, 64)}))
    model, folder = load(tied, pack=False), tmp_path_factory.mktemp("saved")

    save_checkpoint(model, folder)

    assert torch.equal(load(folder, pack=False).head.numbers, model.head.numbers)
    assert not ModelConfig.from_folder(folder).network.tied


def test_a_stored_head_in_another_dtype_is_compared_by_value(tied, caplog):
    def change(tensors):
        rounded = tensors["model.embed_tokens.weight"].bfloat16()
        tensors["model.embed_tokens.weight"] = rounded.float()
        tensors["lm_head.weight"] = rounded

    edit(tied, change)

    assert load(tied).config.network.tied
    assert not warnings(caplog)


def test_a_head_takes_the_place_of_a_tied_embedding_that_is_not_stored(tied):
    def change(tensors):
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")

    expected = safetensors.torch.load_file(tied / SINGLE)["model.embed_tokens.weight"]
    edit(tied, change)

    assert torch.equal(load(tied, pack=False).embed_tokens, expected)


def test_a_stored_head_of_another_shape_does_not_fit(tied):
    edit(tied, lambda tensors: tensors.update({"lm_head.weight": torch.zeros(5, 64)}))

    with pytest.raises(WeightsError, match=r"lm_head\.weight is \[5, 64\], must be \[128, 64\]"):
        load(tied)


BUFFERS = {
    "model.rotary_emb.inv_freq": torch.ones(8, dtype=torch.float64),
    "model.layers.0.self_attn.rotary_emb.cos_cached": torch.ones(512, 16, dtype=torch.bfloat16),
    "model.layers.0.self_attn.rotary_emb.sin_cached": torch.ones(512, 16, dtype=torch.float64),
    "model.layers.1.self_attn.rotary_emb.original_inv_freq": torch.ones(8),
    "model.layers.0.self_attn.masked_bias": torch.tensor(-1e4),
    "model.layers.0.attention.masked_bias": torch.tensor(-1e9, dtype=torch.float64),
    "model.embeddings.position_ids": torch.arange(512)[None],
    "position_ids": torch.arange(512, dtype=torch.int32),
    "model.cos_sin_cache": torch.ones(4, 4),
    "model.layers.0.mlp.up_proj._extra_state": torch.zeros(3, dtype=torch.uint8),
    "freqs_cis": torch.ones(4, 4),
}


@pytest.mark.parametrize("name", BUFFERS)
def test_a_buffer_that_no_parameter_holds_is_ignored_whatever_its_dtype(single, name):
    expected = load(single, pack=False)
    edit(single, lambda tensors: tensors.update({name: BUFFERS[name]}))

    model = load(single, pack=False)

    assert all(map(torch.equal, model.parameters(), expected.parameters()))


@pytest.mark.parametrize("dtype", [torch.uint8, torch.bool, torch.float32, torch.float16])
def test_causal_masks_of_gpt2_are_ignored_in_every_dtype(tmp_path, dtype, caplog):
    CASES["gpt2"].save(tmp_path)
    mask = torch.ones(1, 1, 64, 64).tril().to(dtype)

    def change(tensors):
        for layer in range(2):
            tensors[f"transformer.h.{layer}.attn.bias"] = mask.clone()
            tensors[f"transformer.h.{layer}.attn.masked_bias"] = torch.tensor(-1e4)

    edit(tmp_path, change)

    load(tmp_path)

    assert not warnings(caplog)


IMPLIED = {
    "model.layers.0.self_attn.rotary_emb.inv_freq": 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16),
    "model.rotary_emb.inv_freq": 1.0 / 10_000.0 ** (torch.arange(0, 16, 2) / 16),
    "model.position_ids": torch.arange(40)[None],
    "model.layers.1.self_attn.bias": torch.ones(1, 1, 8, 8, dtype=torch.bool).tril(),
}


@pytest.mark.parametrize("name", IMPLIED)
@pytest.mark.parametrize("changed", [False, True])
def test_a_buffer_that_differs_from_what_the_configuration_implies_is_named(
    single, caplog, name, changed
):
    implied = IMPLIED[name]
    wrong = (
        implied.flip(-1)
        if implied.is_floating_point()
        else implied + 1
        if implied.ndim == 2
        else ~implied
    )
    edit(
        single, lambda tensors: tensors.update({name: (wrong if changed else implied).contiguous()})
    )

    load(single)

    named = [it for it in warnings(caplog) if it.startswith("stored tensors differ") and name in it]
    assert len(named) == changed == len(warnings(caplog))


def test_frequencies_are_compared_as_rounded_to_16_bits(single, caplog):
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(single, lambda tensors: tensors.update({name: IMPLIED[name].half()}))

    load(single)

    assert not warnings(caplog)


def test_frequencies_before_their_scaling_are_no_difference(tmp_path, caplog):
    CASES["llama rope linear"].save(tmp_path)
    name = "model.layers.0.self_attn.rotary_emb.inv_freq"
    edit(tmp_path, lambda tensors: tensors.update({name: IMPLIED[name].clone()}))

    load(tmp_path)

    assert not warnings(caplog)


@pytest.mark.parametrize(
    "name", ["self_attn.k_scale", "self_attn.attn.v_scale", "self_attn.k_proj.k_scale",
             "self_attn.v_proj.output_scale", "self_attn.kv_cache_scaling_factor"],
)  # fmt: skip
def test_scales_of_a_cache_in_fp8_are_not_used_which_is_said(single, caplog, name):
    edit(single, lambda tensors: tensors.update({f"model.layers.0.{name}": torch.tensor(0.5)}))

    load(single)

    (warning,) = warnings(caplog)
    assert warning.startswith("scales of a KV cache in FP8 are not used")
    assert name in warning


def test_layers_beyond_those_of_the_configuration_are_ignored_which_is_said(single, caplog):
    expected = load(single, pack=False)

    def change(tensors):
        for name in [it for it in tensors if ".layers.1." in it]:
            tensors[name.replace(".1.", ".2.")] = tensors[name].clone()
        tensors["model.layers.7.eh_proj.weight"] = torch.zeros(3, dtype=torch.int16)

    edit(single, change)

    model = load(single, pack=False)

    assert all(map(torch.equal, model.parameters(), expected.parameters()))
    (warning,) = warnings(caplog)
    assert "layers beyond the 2 of config.json" in warning


def test_an_unexpected_tensor_is_no_buffer(single):
    edit(single, lambda tensors: tensors.update({"model.layers.0.self_attn.gate": torch.zeros(4)}))

    with pytest.raises(WeightsError, match="1 unexpected"):
        load(single)


def warnings(caplog):
    return [it.getMessage() for it in caplog.records if it.levelname == "WARNING"]


def test_weights_that_float16_cannot_hold_are_refused_with_their_name(single):
    edit(
        single,
        lambda tensors: tensors["model.layers.1.mlp.up_proj.weight"].view(-1)[3:4].fill_(1e5),
    )

    load(single)
    load(single, torch.bfloat16)
    with pytest.raises(
        WeightsError, match=r"layers\.1\.mlp\.up_proj\.weight has weights up to 1e\+05; float16"
    ):
        load(single, torch.float16)


@pytest.mark.parametrize(
    "name", ["model.norm.weight", "lm_head.weight", "model.embed_tokens.weight"]
)
def test_float16_is_checked_for_every_kind_of_tensor(single, name):
    edit(single, lambda tensors: tensors[name].view(-1)[:1].fill_(-7e4))

    with pytest.raises(
        WeightsError, match=f"{name} has weights up to 7e\\+04; float16 holds 65504"
    ):
        load(single, torch.float16)


def test_weights_that_are_no_numbers_are_refused_in_float16(single):
    edit(single, lambda tensors: tensors["lm_head.weight"].view(-1)[:1].fill_(float("nan")))

    with pytest.raises(WeightsError, match=r"lm_head\.weight has weights that are not finite"):
        load(single, torch.float16)


def test_an_untied_head_is_required(single):
    edit(single, lambda tensors: tensors.pop("lm_head.weight"))

    with pytest.raises(WeightsError, match=r"1 missing: lm_head\.weight"):
        load(single)


def test_a_tensor_of_an_unsupported_dtype_is_rejected(single):
    edit(single, lambda t: t.update({"lm_head.weight": torch.zeros(128, 64, dtype=torch.int16)}))

    with pytest.raises(WeightsError, match=r"lm_head\.weight is stored as I16; supported are F32"):
        load(single)


@pytest.mark.parametrize("suffix", [".bin", ".pt", ".pth"])
def test_pickle_files_are_rejected_without_being_opened(single, suffix):
    (single / SINGLE).unlink()
    (single / f"pytorch_model{suffix}").write_bytes(b"cposix\nsystem\n(S'false'\ntR.")

    with pytest.raises(WeightsError, match=rf"pickle only \(pytorch_model{suffix}\)"):
        load(single)


def test_the_error_for_a_folder_without_weights_names_the_expected_files(single):
    (single / SINGLE).unlink()

    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        load(single)


def truncate(file):
    os.truncate(file, file.stat().st_size - 1)


def empty(file):
    file.write_bytes(b"")


def header(length, content=b"{}"):
    def write(file):
        file.write_bytes(struct.pack("<Q", length) + content)

    return write


def outside(file):
    entry = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [0, 80]}}
    text = json.dumps(entry).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)


def negative(file):
    entry = {"x": {"dtype": "F32", "shape": [2], "data_offsets": [-8, 0]}}
    text = json.dumps(entry).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + b"\0" * 8)


@pytest.mark.parametrize(
    "damage",
    [truncate, empty, header(2**60), header(200), header(2, b"[]"), outside, negative],
    ids=["truncated", "empty", "header of 2^60 bytes", "short", "list", "outside", "negative"],
)
def test_the_error_for_a_damaged_file_names_it(sharded, damage):
    damage(first_shard(sharded))

    with pytest.raises(WeightsError, match=f"{first_shard(sharded).name} cannot be read"):
        load(sharded)


def test_the_error_for_a_missing_shard_names_it(sharded):
    first_shard(sharded).unlink()

    with pytest.raises(WeightsError, match=r"index\.json names model-00001-of-\d+\.safetensors"):
        load(sharded)


@pytest.mark.parametrize(
    "name",
    ["../secret.safetensors", "/etc/passwd", "a/b.safetensors", "..", "a\\b.safetensors", "x.bin"],
)
def test_an_index_cannot_name_a_file_outside_the_folder(sharded, name):
    (sharded.parent / "secret.safetensors").write_bytes(b"")
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))

    with pytest.raises(WeightsError, match="only plain names"):
        load(sharded)


@pytest.mark.parametrize("name", ["x" * 300 + ".safetensors", "\0.safetensors"])
def test_the_name_of_a_shard_that_no_file_can_have_is_an_error(sharded, name):
    edit_index(sharded, lambda weight_map: weight_map.update({"lm_head.weight": name}))

    with pytest.raises(WeightsError, match="which is not in"):
        load(sharded)


def test_a_link_out_of_the_folder_is_rejected(sharded, tmp_path_factory):
    shard = first_shard(sharded)
    shard.rename(tmp_path_factory.mktemp("elsewhere") / "shard")
    shard.symlink_to(tmp_path_factory.getbasetemp() / "elsewhere0" / "shard")

    with pytest.raises(WeightsError, match=r"is a link to .*, which is not in the model.s folder"):
        load(sharded)


def test_the_links_of_a_hub_cache_are_followed(sharded, tmp_path_factory):
    repository = tmp_path_factory.mktemp("models--a--b")
    snapshot, blobs = repository / "snapshots" / "c0ffee", repository / "blobs"
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for number, file in enumerate(sorted(sharded.iterdir())):
        file.rename(blobs / str(number))
        (snapshot / file.name).symlink_to(f"../../blobs/{number}")

    load(snapshot)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("{", "not valid JSON"),
        ("[]", "must hold a JSON object"),
        ("{}", "has no weight_map"),
        ('{"weight_map": {}}', "has no weight_map"),
        ('{"weight_map": {"a": 1}}', "must be the name of a file"),
    ],
)
def test_the_error_for_a_broken_index_names_it(sharded, content, message):
    (sharded / INDEX).write_text(content)

    with pytest.raises(WeightsError, match=message) as raised:
        load(sharded)

    assert INDEX in str(raised.value)


def test_the_error_for_a_tensor_that_is_not_in_its_indexed_file_names_it(sharded):
    def change(weight_map):
        weight_map["lm_head.weight"] = first_shard(sharded).name
        weight_map["model.embed_tokens.weight"] = first_shard(sharded).name

    edit_index(sharded, change)

    with pytest.raises(WeightsError, match=r"lacks \S+, which .* places there"):
        load(sharded)


def test_a_tensor_stored_twice_is_rejected(sharded):
    tensors = safetensors.torch.load_file(first_shard(sharded))
    safetensors.torch.save_file(tensors, sharded / "model-extra.safetensors")
    edit_index(sharded, lambda weight_map: weight_map.update({"x": "model-extra.safetensors"}))

    with pytest.raises(WeightsError, match="is in both"):
        load(sharded)


@pytest.mark.slow
def test_weights_larger_than_free_memory_are_rejected_before_allocation(single):
    config = json.loads((single / "config.json").read_text())
    config |= {"hidden_size": 65536, "intermediate_size": 2**20, "num_hidden_layers": 1000}
    config |= {"head_dim": 128, "num_attention_heads": 512}
    (single / "config.json").write_text(json.dumps(config))

    with pytest.raises(WeightsError, match=r"need \d+\.\d GiB .* \d+\.\d GiB"):
        load(single, load_format="dummy")


def test_dummy_weights_need_only_a_configuration(single):
    (single / SINGLE).unlink()

    first, second = (load(single, load_format="dummy", pack=False) for _ in range(2))

    assert torch.equal(first.embed_tokens, second.embed_tokens)
    logits = first.logits(first(torch.tensor([[1, 2, 3]]), torch.arange(3)))
    assert torch.isfinite(logits).all()
    assert logits.std() > 0


def test_float16_on_the_cpu_matches_the_logits_of_transformers(single):
    oracle = transformers.AutoModelForCausalLM.from_pretrained(single)
    ids = torch.tensor([[1, 5, 9, 2]])
    model = load(single, torch.float16)

    ours = model.logits(model(ids, torch.arange(4)))

    theirs = oracle(ids).logits
    assert (ours - theirs).abs().max() <= 1e-2 * theirs.abs().max()


def test_pages_that_are_dropped_are_read_again(tmp_path):
    values = torch.arange(1 << 16)
    safetensors.torch.save_file({"it": values, "other": values + 1}, tmp_path / "model.safetensors")

    for name, tensor in read_tensors(read_headers(tmp_path)):
        drop_pages(tensor)

        assert torch.equal(tensor, values + (name == "other"))

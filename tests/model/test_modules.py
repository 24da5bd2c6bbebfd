"""The modules of transformers that are refused by name, and the network that the others state."""

import dataclasses
import json

import pytest
import torch
import transformers

from model.checkpoint.config import ModelConfig
from model.errors import ModelError, ModelFolderError, UnsupportedModelError, WeightsError
from model.modules import load_modules, with_modules
from tests.model.checkpoint.hf_checkpoints import Case
from tests.model.library_cases import CASES

CPU = torch.device("cpu")
REFUSED = {
    "s_aux": (Case("GptOss", {"num_local_experts": 4, "head_dim": 16}), "s_aux of attention"),
    "its own attention": (Case("StableLm"), "attention of its own"),
    "position bias": (
        Case("Bloom", {"n_layer": 2, "n_head": 4, "seq_length": 512}),
        "attention of its own",
    ),
    "no causal mask": (
        Case("Bert", named="BertLMHeadModel"),
        "a mask that is neither causal nor a sliding window",
    ),
    "two calls": (Case("DiffLlama"), "more than one attention in layer 0"),
    "convolutions": (
        Case("Lfm2", {"layer_types": ["conv", "full_attention"]}),
        "layers of type conv",
    ),
    "recurrent": (
        Case("Jamba", {"num_experts": 1, "use_mamba_kernels": False}),
        r"layers with a state of fixed size \(recurrent or convolutional\)",
    ),
    "chunks": (
        Case("Llama4Text", {"num_local_experts": 2, "intermediate_size_mlp": 96}, named="Llama4ForCausalLM"),
        "layers of type chunked_attention",
    ),
    "latent keys": (
        Case("DeepseekV3", {
            "n_routed_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32, "q_lora_rank": 16,
            "kv_lora_rank": 16, "qk_rope_head_dim": 8, "qk_nope_head_dim": 8, "v_head_dim": 8, "n_group": 1,
            "topk_group": 1, "num_key_value_heads": 4,
        }),
        r"values of another size than keys and queries \(8, 16, 16\)",
    ),
    "rotation by the longest sequence": (
        Case("Olmo", {"rope_parameters": {
            "rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0
        }}),
        "a rotation of type dynamic, which depends on the longest sequence of a step",
    ),
}  # fmt: skip


def stated(folder):
    return with_modules(folder, ModelConfig.from_folder(folder, "transformers"))


def write_config(case, folder):
    (folder / "config.json").write_text(json.dumps(case.content))


def loaded(folder, dtype=torch.float32):
    return load_modules(folder, stated(folder), dtype, CPU)


@pytest.mark.parametrize("name", REFUSED)
def test_what_our_attention_does_not_compute_is_refused_by_name(name, tmp_path):
    case, said = REFUSED[name]
    write_config(case, tmp_path)

    with pytest.raises(UnsupportedModelError, match=said) as refusal:
        stated(tmp_path)
    assert "--model-backend transformers does not compute" in str(refusal.value)


def test_the_network_is_what_the_modules_call(tmp_path):
    write_config(CASES["modernbert windows"], tmp_path)

    network = stated(tmp_path).network

    assert sorted((it.window or 0) for it in network.attentions) == [0, 8]
    assert {(it.num_heads, it.num_kv_heads, it.head_dim) for it in network.attentions} == {
        (4, 4, 16)
    }
    assert network.hidden == 64
    model = loaded_random(CASES["modernbert windows"])
    assert network.num_parameters == sum(it.numel() for it in model.parameters())


def loaded_random(case):
    return getattr(transformers, case.architecture)(case.config())


def test_code_of_a_checkpoint_is_not_run(tmp_path):
    content = CASES["olmo"].content | {
        "model_type": "own", "architectures": ["OwnForCausalLM"],
        "auto_map": {"AutoConfig": "own.Config", "AutoModelForCausalLM": "own.Model"},
    }  # fmt: skip
    (tmp_path / "config.json").write_text(json.dumps(content))
    (tmp_path / "own.py").write_text("raise SystemExit('this code has run')")

    with pytest.raises(ModelError, match=r"transformers cannot read config\.json"):
        stated(tmp_path)


def test_a_library_that_lacks_the_model_is_named(tmp_path):
    content = CASES["olmo"].content | {"model_type": "never_heard_of"}
    (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(ModelFolderError, match="never_heard_of"):
        stated(tmp_path)


def test_a_model_without_a_decoder_is_refused(tmp_path):
    content = CASES["olmo"].content | {"model_type": "vit"}
    (tmp_path / "config.json").write_text(json.dumps(content))

    with pytest.raises(UnsupportedModelError, match="no decoder of model_type 'vit'"):
        stated(tmp_path)


def test_missing_and_wrongly_shaped_tensors_are_refused_by_name(tmp_path):
    CASES["olmo"].save(tmp_path)
    content = json.loads((tmp_path / "config.json").read_text())
    for changes, said in (
        ({"num_hidden_layers": 3}, r"missing: .*layers\.2"),
        ({"intermediate_size": 100}, "wrongly shaped|size mismatch|cannot load"),
    ):
        (tmp_path / "config.json").write_text(json.dumps(content | changes))
        with pytest.raises(WeightsError, match=said):
            loaded(tmp_path)


def test_weights_as_pickles_and_folders_without_weights_are_refused(tmp_path):
    model = CASES["olmo"].save(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    torch.save(model.state_dict(), tmp_path / "pytorch_model.bin")

    with pytest.raises(ModelError, match="pickle"):
        loaded(tmp_path)


def test_a_truncated_file_is_refused(tmp_path):
    CASES["olmo"].save(tmp_path)
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])

    with pytest.raises(WeightsError):
        loaded(tmp_path)


def test_modules_that_mix_tokens_outside_of_attention_are_refused(tmp_path):
    """What the probe cannot see: a value of a token that depends on the other tokens of its step."""
    CASES["olmo"].save(tmp_path)
    model = loaded(tmp_path)
    model.check(4)

    norm = model.library.model.norm
    norm.register_forward_hook(lambda _module, _inputs, out: out + 0.1 * out.mean(1, keepdim=True))
    with pytest.raises(UnsupportedModelError, match="other scores for chunks"):
        model.check(4)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes_the_check_of_the_first_tokens(dtype, tmp_path):
    CASES["olmo"].save(tmp_path)

    model = loaded(tmp_path, dtype)
    model.check(16)
    assert model.cache_dtype is dtype


def test_models_with_less_context_than_the_check_are_served(tmp_path):
    case = dataclasses.replace(
        CASES["codegen"], changes=CASES["codegen"].changes | {"n_positions": 7}
    )
    case.save(tmp_path)

    loaded(tmp_path).check(4)

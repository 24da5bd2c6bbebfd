"""`tessera merge` writes what PEFT merges."""

import copy
import shutil

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file

from model.errors import AdapterError
from server.cli.local_models.merge import merge_adapter
from server.cli.main import main
from tests.model.adapters.peft_adapters import ALL_LINEAR, HYBRIDS, adapted, all_linear
from tests.model.checkpoint.hf_checkpoints import CASES, VOCAB_SIZE

KINDS = {"llama": "llama", "granite": "llama", "phi3": "phi3", "gpt2": "gpt2"}


TARGETS = {case: all_linear(kind) for case, kind in KINDS.items()} | dict.fromkeys(
    HYBRIDS, ALL_LINEAR
)


@pytest.mark.parametrize(("case", "targets"), TARGETS.items())
def test_a_merged_checkpoint_is_that_of_peft(case, targets, tmp_path):
    model = CASES[case].save(tmp_path / "base")
    (tmp_path / "base" / "tokenizer_config.json").write_text("{}")
    with_adapter = adapted(copy.deepcopy(model), tmp_path / "adapter", 4, targets)

    merge_adapter(tmp_path / "base", tmp_path / "adapter", tmp_path / "merged")

    merged = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "merged", attn_implementation="eager"
    )
    ids = torch.arange(20)[None] % VOCAB_SIZE
    with torch.inference_mode():
        torch.testing.assert_close(
            merged(ids).logits, with_adapter(ids).logits, rtol=1e-3, atol=1e-3
        )
    assert (tmp_path / "merged" / "tokenizer_config.json").read_text() == "{}"


def test_a_quantized_model_is_refused(tmp_path):
    from model.checkpoint.config import ModelConfig
    from model.checkpoint.save import save_checkpoint
    from model.checkpoint.weights import load_model

    model = CASES["llama"].save(tmp_path / "base")
    config = ModelConfig.from_folder(tmp_path / "base")
    loaded = load_model(tmp_path / "base", config, torch.float32, "cpu", pack=False)
    save_checkpoint(loaded, tmp_path / "int8", int8=True)
    adapted(model, tmp_path / "adapter", 4)

    with pytest.raises(AdapterError, match="is quantized"):
        merge_adapter(tmp_path / "int8", tmp_path / "adapter", tmp_path / "merged")
    assert not (tmp_path / "merged").exists()


def test_the_command_writes_no_folder_that_has_files(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("sys.argv", ["tessera", "merge", "bundled", str(tmp_path), str(tmp_path)])
    (tmp_path / "file").write_text("")

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 1
    assert "exists; give a folder that does not" in capsys.readouterr().err


@pytest.fixture
def pair(tmp_path):
    """Folders of a model in float16 and an adapter."""
    model = CASES["llama"].save(tmp_path / "base")
    adapted(copy.deepcopy(model), tmp_path / "adapter", 4, ["q_proj"])
    model.half().save_pretrained(tmp_path / "base")
    return tmp_path


@pytest.mark.parametrize("exists", [False, True])
def test_a_sum_that_the_dtype_cannot_hold_is_refused_by_name(pair, exists):
    file = pair / "adapter" / "adapter_model.safetensors"
    tensors = load_file(file)
    name = "base_model.model.model.layers.1.self_attn.q_proj.lora_B.weight"
    tensors[name] = torch.full_like(tensors[name], 1e5)
    save_file(tensors, file)
    if exists:
        (pair / "merged").mkdir()
    before = sorted(pair.rglob("*"))

    with pytest.raises(
        AdapterError, match=r"model\.layers\.1\.self_attn\.q_proj: float16 cannot hold the sum"
    ):
        merge_adapter(pair / "base", pair / "adapter", pair / "merged")
    assert sorted(pair.rglob("*")) == before


@pytest.mark.parametrize("exists", [False, True])
def test_files_get_to_the_folder_when_all_are_complete(pair, exists, monkeypatch):
    if exists:
        (pair / "merged").mkdir()
    before = sorted(pair.rglob("*"))
    copyfile = shutil.copyfile

    def is_full(*_):
        assert not (pair / "merged" / "model.safetensors").exists()
        raise OSError(28, "No space left on device", "file")

    monkeypatch.setattr("shutil.copyfile", is_full)
    with pytest.raises(OSError, match="No space"):
        merge_adapter(pair / "base", pair / "adapter", pair / "merged")
    assert sorted(pair.rglob("*")) == before

    monkeypatch.setattr("shutil.copyfile", copyfile)
    merge_adapter(pair / "base", pair / "adapter", pair / "merged")
    assert {"config.json", "model.safetensors"} <= {it.name for it in (pair / "merged").iterdir()}
    assert not list(pair.rglob("*.partial"))


def test_a_folder_that_cannot_be_written_is_an_error_of_one_line(pair, capsys, monkeypatch):
    (pair / "file").write_text("")
    arguments = [str(pair / it) for it in ("base", "adapter", "file/merged")]
    monkeypatch.setattr("sys.argv", ["tessera", "merge", *arguments])

    with pytest.raises(SystemExit) as ended:
        main()

    assert ended.value.code == 1
    assert "cannot be written: Not a directory" in capsys.readouterr().err

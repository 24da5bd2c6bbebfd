"""A checkpoint that we store in 8 bits gives the same logits in `transformers` with `compressed-tensors`."""

import pytest
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.save import save_checkpoint
from model.checkpoint.weights import load_model
from tests.model.checkpoint.hf_checkpoints import CASES

transformers = pytest.importorskip("transformers")
pytest.importorskip("compressed_tensors", reason="needs compressed-tensors")


@pytest.mark.slow
@pytest.mark.parametrize("case", ["llama", "qwen3 tied biases"])
def test_transformers_gives_the_logits_of_a_checkpoint_stored_in_8_bits(case, tmp_path):
    CASES[case].save(tmp_path / "exact")
    exact = load_model(
        tmp_path / "exact",
        ModelConfig.from_folder(tmp_path / "exact"),
        torch.float32,
        "cpu",
        pack=False,
    )
    save_checkpoint(exact, tmp_path / "small", int8=True)
    config = ModelConfig.from_folder(tmp_path / "small")
    ours = load_model(tmp_path / "small", config, torch.float32, "cpu", pack=False)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(
        tmp_path / "small", dtype=torch.float32
    )
    ids = torch.arange(7, 27)[None] % config.network.vocab

    with torch.no_grad():
        expected = theirs(ids).logits
        found = ours.logits(ours(ids, torch.arange(20)))

    torch.testing.assert_close(found, expected, atol=1e-4, rtol=1e-4)

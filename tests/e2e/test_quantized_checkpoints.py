"""Quantized checkpoints over HTTP: the tokens of transformers on the dequantized weights, and what the service says."""

import shutil

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from model.hub.names import BUNDLED_FOLDER
from tests.e2e.conftest import CLIENT
from tests.model.checkpoint import format_samples
from tests.model.checkpoint.compressed import FILE, arguments, compress, group, write_config
from tests.model.checkpoint.packed_checkpoints import awq_checkpoint, gptq_checkpoint
from tests.model.oracle import generated

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(300)]

PROMPT = "def add(a, b):"
TOKENS = 120
BLOCKS = format_samples.HF_FP8 | {"weight_block_size": [128, 128]}


def in_blocks(folder):
    return format_samples.store(folder, format_samples.blocks(128), "weight_scale_inv", BLOCKS)


def act_order(folder):
    return gptq_checkpoint(folder, 64, sym=False, act_order=True)


def compressed(form, **weights):
    return lambda folder: compress(folder, {"group_0": group(arguments(**weights))}, form)


@pytest.mark.parametrize(
    ("store", "said", "options"),
    [
        (in_blocks, "fp8-blocks", ()),
        (compressed("float-quantized", type="float"), "fp8", ()),
        (compressed("float-quantized", type="float", strategy="tensor"), "fp8", ("--tensor-parallel=2",)),
        (compressed("int-quantized", strategy="group", group_size=64), "int8-groups", ("--quantization=none",)),
        (compressed("int-quantized"), "int8-rows", ("--quantization=none",)),
        (compressed("pack-quantized", num_bits=4, strategy="group", group_size=32), "w4a16", ()),
        (awq_checkpoint, "awq", ("--tensor-parallel=2",)),
        (act_order, "gptq", ()),
        (act_order, "gptq", ("--tensor-parallel=2",)),
    ],
    ids=[
        "blocks", "fp8", "fp8 of two ranks", "int8 groups", "int8", "w4a16", "awq of two ranks", "act-order",
        "act-order of two ranks",
    ],
)  # fmt: skip
def test_a_service_continues_a_prompt_as_transformers_does(
    tmp_path, start_service, store, said, options
):
    folder = tmp_path / "it"
    shutil.copytree(BUNDLED_FOLDER, folder)
    save_whole(folder)
    exact = store(folder)

    service = start_service(f"--model={folder}", "--device=cpu", "--dtype=float32", *options)
    service.wait_until_healthy(120)
    info = CLIENT.get(f"{service.url}/info").json()
    body = {"inputs": PROMPT, "parameters": {"max_new_tokens": TOKENS, "details": True, "do_sample": False,
            "repetition_penalty": 1.0, "ignore_eos": True}}  # fmt: skip
    reply = CLIENT.post(f"{service.url}/generate", json=body, timeout=180).json()

    assert info["quantization"] == said
    found = reply["details"]["tokens"]
    ids, logprobs = expected(exact, len(found))
    assert [it["id"] for it in found] == ids
    assert (
        max(abs(it["logprob"] - theirs) for it, theirs in zip(found, logprobs, strict=True)) < 1e-3
    )


def save_whole(folder):
    """Store the tensors in one file, as float32."""
    tensors = {}
    for shard in folder.glob("model-*.safetensors"):
        tensors |= load_file(shard)
        shard.unlink()
    (folder / "model.safetensors.index.json").unlink()
    save_file({name: it.float() for name, it in tensors.items()}, folder / FILE)
    write_config(folder, torch_dtype="float32")


def expected(folder, count):
    """Return the tokens that transformers generates, and their log-probabilities."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    prompt = AutoTokenizer.from_pretrained(folder)(PROMPT).input_ids
    found = generated(model, prompt, count)
    return found.tokens, found.logprobs

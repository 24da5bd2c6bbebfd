"""Rewrites the files of tiny checkpoints, as other tools write them."""

import json

import safetensors.torch
import torch

from model.checkpoint.config import ModelConfig
from model.checkpoint.weights import load_model
from tests.model.executors.paged import logits_in_chunks

TENSORS = "model.safetensors"


def load(folder):
    return load_model(folder, ModelConfig.from_folder(folder), torch.float32, "cpu")


def logits(folder):
    """Return the logits of a checkpoint for a prompt in chunks."""
    return logits_in_chunks(load(folder), list(range(3, 63)), 17)


def expected_logits(oracle):
    """Return those of transformers."""
    with torch.inference_mode():
        return oracle(torch.tensor([list(range(3, 63))])).logits[0]


def edit_config(folder, change):
    """Rewrite config.json to what `change` returns for its content."""
    file = folder / "config.json"
    file.write_text(json.dumps(change(json.loads(file.read_text()))))


def rename(folder, new_name):
    """Rename the tensors by a function; None drops one."""
    tensors = safetensors.torch.load_file(folder / TENSORS)
    named = {new_name(name): tensor for name, tensor in tensors.items()}
    safetensors.torch.save_file(
        {name: tensor.contiguous() for name, tensor in named.items() if name is not None},
        folder / TENSORS,
        metadata={"format": "pt"},
    )


def add_tensors(folder, tensors):
    stored = safetensors.torch.load_file(folder / TENSORS)
    safetensors.torch.save_file(stored | tensors, folder / TENSORS, metadata={"format": "pt"})

"""Texts of answers that several peers' tables share."""

from __future__ import annotations

from typing import Final

GPU_MEMORY: Final = (
    "--gpu-memory-utilization is a share of the memory of a GPU, --kv-cache-gib is for the KV cache"
)
SEED: Final = "a seed belongs to a request: its field seed; --deterministic is for equal bits"
HUB_FOLDER: Final = "the environment variable HF_HUB_CACHE names the folder of downloads"
HUB_TOKEN: Final = "the environment variable HF_TOKEN has the token, where others cannot see it"  # noqa: S105 - a text
OFFLINE: Final = "the environment variable HF_HUB_OFFLINE=1 forbids downloads"
GPU_CHOICE: Final = "the environment variable CUDA_VISIBLE_DEVICES chooses the GPUs"
OTLP: Final = "--otlp-endpoint takes the address of a collector for OTLP over HTTP (port 4318), not gRPC (4317)"
ACCESS_LOG: Final = "--access-log logs a line for each request, never its prompt"
TOOL_FORMAT: Final = "--tool-call-format is found by the chat template"
NO_REMOTE_CODE: Final = "code of checkpoints is never run"
ONE_MACHINE: Final = "a service runs on one machine"
ONE_STAGE: Final = "a model is divided by --tensor-parallel only"
METRICS: Final = "GET /metrics always works"
CHUNKS: Final = "long prompts are computed in chunks"
CONSTRAINTS: Final = "llguidance compiles the constraints of answers"
DRAFTS: Final = (
    "drafts come from the text, without a model, and are on by default; "
    "--max-draft-tokens is the most tokens at once"
)

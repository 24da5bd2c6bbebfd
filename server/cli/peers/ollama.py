"""The environment variables of Ollama, of summer 2026. `ollama serve` has no flags.

None is read as a setting: its users have them set for Ollama on the same machine, and OLLAMA_HOST is the address that
clients connect to as well.
"""

from __future__ import annotations

from typing import Final

from server.cli.peers import common, subjects
from server.cli.peers.answers import Peer, absent, near

OLLAMA: Final = Peer(
    "Ollama",
    (
        near("--host and --port are the address to listen on; OLLAMA_HOST is also the one that clients connect to",
             "", "OLLAMA_HOST"),
        near("--max-model-len limits a sequence", "", "OLLAMA_CONTEXT_LENGTH"),
        near("--max-num-seqs limits the sequences that run at the same time", "", "OLLAMA_NUM_PARALLEL"),
        near("--max-concurrent-requests limits the requests in progress, running and queued", "", "OLLAMA_MAX_QUEUE"),
        near("--kv-cache-dtype is auto or fp8", "", "OLLAMA_KV_CACHE_TYPE"),
        near("--cors-allow-origin allows pages of other origins", "", "OLLAMA_ORIGINS"),
        near("HF_HUB_CACHE names the folder of downloads", "", "OLLAMA_MODELS"),
        near("--log-level debug logs more", "", "OLLAMA_DEBUG"),
        near(common.ACCESS_LOG, "", "OLLAMA_DEBUG_LOG_REQUESTS"),
        near("attention is always flash attention", "", "OLLAMA_FLASH_ATTENTION"),
        near(common.GPU_MEMORY, "", "OLLAMA_GPU_OVERHEAD"),
        near("--tensor-parallel and --data-parallel use several GPUs", "", "OLLAMA_SCHED_SPREAD"),
        absent(subjects.OTHER, "",
               "OLLAMA_AUTH OLLAMA_EDITOR OLLAMA_GO_TEMPLATE OLLAMA_IGPU_ENABLE OLLAMA_KEEP_ALIVE OLLAMA_LLM_LIBRARY "
               "OLLAMA_LOAD_TIMEOUT OLLAMA_MAX_LOADED_MODELS OLLAMA_MAX_TRANSFER_STREAMS OLLAMA_NOHISTORY "
               "OLLAMA_NOPRUNE OLLAMA_NO_CLOUD OLLAMA_REMOTES OLLAMA_VULKAN"),
    ),
    prefix="OLLAMA_",
)  # fmt: skip

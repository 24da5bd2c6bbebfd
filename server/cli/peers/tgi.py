"""The flags and environment variables of Text Generation Inference's launcher, 3.3."""

from __future__ import annotations

from typing import Final

from server.cli.peers import common, forms, subjects
from server.cli.peers.answers import Peer, absent, always, near, understood

_INPUT: Final = (
    "--max-model-len limits prompt and output together; there is no limit of prompts alone"
)

TGI: Final = Peer(
    "Text Generation Inference",
    (
        understood("lora_modules", "--lora-adapters", "LORA_ADAPTERS", form=forms.named_adapters),
        understood("model", "--model-id", "MODEL_ID"),
        understood("revision", "--revision", "REVISION", needs="MODEL_ID"),
        understood("host", "--hostname"),
        understood("port", "--port -p"),
        understood("port", "", "PORT", form=forms.port_number),
        understood("dtype", "--dtype", "DTYPE"),
        understood("quantization", "--quantize", "QUANTIZE"),
        understood("kv_cache_dtype", "--kv-cache-dtype", "KV_CACHE_DTYPE"),
        understood("tensor_parallel", "--num-shard", "NUM_SHARD"),
        understood("tensor_parallel", "--sharded", "SHARDED", form=forms.sharded),
        understood("max_model_len", "--max-total-tokens", "MAX_TOTAL_TOKENS"),
        understood("max_prefill_tokens", "--max-batch-prefill-tokens", "MAX_BATCH_PREFILL_TOKENS"),
        understood("kv_cache_tokens", "--max-batch-total-tokens", "MAX_BATCH_TOTAL_TOKENS"),
        understood("gpu_memory_utilization", "--cuda-memory-fraction", "CUDA_MEMORY_FRACTION"),
        understood("max_num_seqs", "--max-batch-size", "MAX_BATCH_SIZE"),
        understood("max_draft_tokens", "--speculate", "SPECULATE"),
        understood("max_concurrent_requests", "--max-concurrent-requests", "MAX_CONCURRENT_REQUESTS"),
        understood("max_body_bytes", "--payload-limit", "PAYLOAD_LIMIT"),
        understood("drain_timeout", "--graceful-termination-timeout -g", "GRACEFUL_TERMINATION_TIMEOUT"),
        understood("log_format", "--json-output", "JSON_OUTPUT", form=forms.json_format, takes="nothing"),
        understood("cors_allow_origin", "--cors-allow-origin", "CORS_ALLOW_ORIGIN"),
        understood("api_key", "--api-key", "API_KEY"),
        understood("enable_prefix_caching", "", "PREFIX_CACHING", form=forms.on),
        understood("cuda_graphs", "--cuda-graphs", "CUDA_GRAPHS", form=forms.graphs),
        always(common.NO_REMOTE_CODE, "--trust-remote-code", "TRUST_REMOTE_CODE", either=True),
        always("no statistics of use are sent", "--usage-stats", "USAGE_STATS", takes="value"),
        always("log-probabilities of prompts are computed for requests that ask for them",
               "--enable-prefill-logprobs", "ENABLE_PREFILL_LOGPROBS", either=True),
        always(common.CHUNKS, "", "PREFILL_CHUNKING"),
        always("threads and batches need no such setting",
               "--validation-workers --waiting-served-ratio --max-waiting-tokens --shard-uds-path",
               "VALIDATION_WORKERS WAITING_SERVED_RATIO MAX_WAITING_TOKENS SHARD_UDS_PATH", takes="value"),
        near(_INPUT, "--max-input-tokens --max-input-length", "MAX_INPUT_TOKENS MAX_INPUT_LENGTH"),
        near("GET /metrics has the metrics, on the port of the service", "--prometheus-port", "PROMETHEUS_PORT"),
        near(common.HUB_FOLDER, "--huggingface-hub-cache --weights-cache-override", "WEIGHTS_CACHE_OVERRIDE"),
        near(common.OTLP, "--otlp-endpoint", "OTLP_ENDPOINT"),
        near("traces have the name of the variable OTEL_SERVICE_NAME", "--otlp-service-name", "OTLP_SERVICE_NAME"),
        near("--host is the address to listen on; HOSTNAME is the name of this machine in most shells and containers",
             "", "HOSTNAME"),
        near("--chat-template gives another template", "--tokenizer-config-path", "TOKENIZER_CONFIG_PATH"),
        near("`tessera doctor` describes the machine", "--env -e", takes="nothing"),
        near("HF_TOKEN is the variable with the token of the Hub", "", "HF_API_TOKEN"),
        near("--log-level is debug, info, warning or error", "", "LOG_LEVEL"),
        # The rest is not in Tessera.
        absent(
            subjects.TUNNEL,
            "--ngrok --ngrok-authtoken --ngrok-edge",
            "NGROK NGROK_AUTHTOKEN NGROK_EDGE",
        ),
        absent(
            subjects.WATERMARK,
            "--watermark-delta --watermark-gamma",
            "WATERMARK_DELTA WATERMARK_GAMMA",
        ),
        absent(
            subjects.ROPE,
            "--rope-factor --rope-scaling",
            "ROPE_FACTOR ROPE_SCALING",
        ),
        absent(
            subjects.NODES,
            "--master-addr --master-port",
            "MASTER_ADDR MASTER_PORT",
        ),
        absent(
            subjects.LIMITS,
            "--disable-grammar-support --max-best-of --max-client-batch-size --max-stop-sequences "
            "--max-top-n-tokens",
            "DISABLE_GRAMMAR_SUPPORT MAX_BEST_OF MAX_CLIENT_BATCH_SIZE MAX_STOP_SEQUENCES MAX_TOP_N_TOKENS",
        ),
        absent(
            subjects.KERNELS,
            "--disable-custom-kernels",
            "ATTENTION DISABLE_CUSTOM_KERNELS DISABLE_EXLLAMA EXLLAMA_VERSION USE_FLASH_ATTENTION",
        ),
    ),
    variables_are_flags=True,
)  # fmt: skip

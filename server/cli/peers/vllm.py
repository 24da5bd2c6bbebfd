"""The flags and environment variables of vLLM, 0.25 to 0.33, and flags of older versions."""

from __future__ import annotations

from typing import Final

from server.cli.peers import common, forms, subjects
from server.cli.peers.answers import Peer, absent, always, near, understood

VLLM: Final = Peer(
    "vLLM",
    (
        understood("model", "--model --model-tag"),
        understood("revision", "--revision"),
        understood("served_model_name", "--served-model-name"),
        understood("generation_config", "--generation-config"),
        understood("chat_template", "--chat-template"),
        understood("tool_call_format", "--tool-call-parser"),
        understood("host", "--host"),
        understood("port", "--port"),
        understood("frontends", "--api-server-count -asc"),
        understood("dtype", "--dtype"),
        understood("device", "--device"),
        understood("quantization", "--quantization -q"),
        understood("load_format", "--load-format"),
        understood("model_backend", "--model-impl"),
        understood("max_model_len", "--max-model-len"),
        understood("max_num_seqs", "--max-num-seqs"),
        understood("max_draft_tokens", "--num-speculative-tokens --spec-tokens"),
        understood("lora_modules", "--lora-modules"),
        understood("max_loras", "--max-loras"),
        understood("max_lora_rank", "--max-lora-rank"),
        understood("max_cpu_loras", "--max-cpu-loras"),
        understood("max_num_batched_tokens", "--max-num-batched-tokens"),
        understood("block_size", "--block-size"),
        understood("kv_cache_dtype", "--kv-cache-dtype"),
        understood("kv_cache_gib", "--kv-cache-memory-bytes", form=forms.gib_of_bytes),
        understood("gpu_memory_utilization", "--gpu-memory-utilization --device-memory-utilization"),
        understood("cuda_graphs", "--enforce-eager", form=forms.off, takes="nothing"),
        understood("overlap", "--async-scheduling", form=forms.on, takes="nothing"),
        understood("enable_prefix_caching", "--enable-prefix-caching", form=forms.on, takes="nothing"),
        understood("tensor_parallel", "--tensor-parallel-size -tp --tp"),
        understood("data_parallel", "--data-parallel-size -dp --dp"),
        understood("api_key", "--api-key", "VLLM_API_KEY"),
        understood("cors_allow_origin", "--allowed-origins", form=forms.json_list),
        understood("access_log", "--disable-uvicorn-access-log", form=forms.off, takes="nothing"),
        understood("drain_timeout", "--shutdown-timeout"),
        understood("keep_alive_timeout", "", "VLLM_HTTP_TIMEOUT_KEEP_ALIVE"),
        understood("log_level", "", "VLLM_LOGGING_LEVEL", form=forms.lower),
        understood("deterministic", "", "VLLM_BATCH_INVARIANT", form=forms.on),
        always("tools may always be called", "--enable-auto-tool-choice"),
        always(common.CHUNKS, "--enable-chunked-prefill"),
        always(common.NO_REMOTE_CODE, "--trust-remote-code", either=True),
        always("prompts are never logged", "--disable-log-requests"),
        always("there is no log of statistics; GET /metrics has them", "--disable-log-stats", either=True),
        always("replies have an X-Request-ID", "--enable-request-id-headers"),
        always("usage has prompt_tokens_details", "--enable-prompt-tokens-details"),
        always("several sequences share the reading of equal prefixes where that is faster",
               "--disable-cascade-attn", only="false", takes="optional"),
        always("the model is loaded as a generative one", "--runner --task", only="auto generate", takes="value"),
        always("the model is loaded as a generative one", "--convert", only="auto none", takes="value"),
        always("tokenizer.json of the checkpoint is read", "--tokenizer-mode", only="auto hf fast", takes="value"),
        always("config.json of the checkpoint is read", "--config-format", only="auto hf", takes="value"),
        always("requests are served by priority and then in the order of arrival", "--scheduling-policy",
               only="fcfs priority", takes="value"),
        always("each token is sent when it is computed", "--stream-interval", only="1", takes="value"),
        always(common.CONSTRAINTS, "--guided-decoding-backend", only="auto guidance", takes="value"),
        always("the processes of a service are its own", "--distributed-executor-backend", only="mp uni",
               takes="value"),
        always(common.ONE_MACHINE, "--nnodes -n", only="1", takes="value"),
        always(common.ONE_MACHINE, "--node-rank -r", only="0", takes="value"),
        always(common.ONE_STAGE, "--pipeline-parallel-size -pp --pp --prefill-context-parallel-size -pcp "
               "--decode-context-parallel-size -dcp", only="1", takes="value"),
        always("new answers have the role assistant", "--response-role", only="assistant", takes="value"),
        always("no statistics of use are sent", "", "VLLM_NO_USAGE_STATS VLLM_DO_NOT_TRACK", either=True),
        near("--kv-cache-tokens sets the size of the KV cache: blocks times --block-size",
             "--num-gpu-blocks-override"),
        near("--kv-cache-gib sets the size of the KV cache", "", "VLLM_CPU_KVCACHE_SPACE"),
        near("--cpu-threads sets the number of threads", "", "VLLM_CPU_OMP_THREADS_BIND VLLM_CPU_NUM_OF_RESERVED_CPU"),
        near("--max-queued-tokens limits the prompt tokens of requests that have not begun", "--max-num-queued-tokens"),
        near("--max-body-bytes limits the body of a request", "", "VLLM_HTTP_MAX_REQUEST_BODY_SIZE"),
        near(common.SEED, "--seed"),
        near(common.HUB_FOLDER, "--download-dir"),
        near(common.HUB_TOKEN, "--hf-token"),
        near(common.GPU_CHOICE, "--device-ids"),
        near(common.DRAFTS, "--speculative-config -sc --spec-method --ngram-prompt-lookup-max "
             "--ngram-prompt-lookup-min"),
        near(common.OTLP, "--otlp-traces-endpoint"),
        near(common.ACCESS_LOG, "--enable-log-requests", takes="nothing"),
        near("--log-level is that of all messages", "--uvicorn-log-level"),
        near("adapters are on with --lora-modules, --lora-folder or --max-loras", "--enable-lora", takes="nothing"),
        near("a key with manages_adapters=1 in --api-key-file may load adapters", "",
             "VLLM_ALLOW_RUNTIME_LORA_UPDATING"),
        near("--max-concurrent-requests limits the requests in progress, running and queued",
             "--max-num-queued-reqs --max-num-active-seqs"),
        near("--max-prefill-tokens and --max-num-batched-tokens limit the tokens of a step",
             "--max-num-scheduled-tokens"),
        near("--max-header-bytes limits the header fields", "--h11-max-incomplete-event-size --h11-max-header-count"),
        near("--cuda-graphs and --overlap are switches, and on", "--optimization-level -O --performance-mode"),
        near("a language model without its other parts is served where `tessera plan MODEL` works",
             "--language-model-only", takes="nothing"),
        near("--device chooses CPU or GPU", "", "VLLM_TARGET_DEVICE"),
        near("--host is the address to listen on; VLLM_HOST_IP and VLLM_PORT are addresses between vLLM's processes",
             "", "VLLM_HOST_IP VLLM_PORT"),
        near("--engine-hang-seconds limits a step", "",
             "VLLM_ENGINE_ITERATION_TIMEOUT_S VLLM_EXECUTE_MODEL_TIMEOUT_SECONDS"),
        # The rest is not in Tessera.
        absent(
            subjects.LORA,
            "--default-mm-loras --enable-mixed-moe-lora-format --enable-moe-shared-loras "
            "--enable-prompt-adapter --enable-tower-connector-lora --fully-sharded-loras "
            "--long-lora-scaling-factors --lora-dtype --lora-extra-vocab-size "
            "--lora-target-modules --max-lora-cls-labels "
            "--max-prompt-adapters --prompt-adapters --qlora-adapter-name-or-path --specialize-active-lora",
            "VLLM_LORA_DISABLE_PDL VLLM_LORA_ENABLE_DUAL_STREAM "
            "VLLM_LORA_RESOLVER_CACHE_DIR VLLM_LORA_RESOLVER_HF_REPO_LIST",
        ),
        absent(
            subjects.SPECULATION,
            "--num-lookahead-slots "
            "--per-request-spec-decode-metrics --spec-model "
            "--speculative-draft-tensor-parallel-size --speculative-model",
        ),
        absent(
            subjects.POOLING,
            "--enable-flash-late-interaction --override-pooler-config --pooler-config",
        ),
        absent(
            subjects.TLS,
            "--enable-ssl-refresh --ssl-ca-certs --ssl-cert-reqs --ssl-certfile --ssl-ciphers --ssl-keyfile",
        ),
        absent(
            subjects.PATH_PREFIX,
            "--root-path",
        ),
        absent(
            subjects.CORS,
            "--allow-credentials --allowed-headers --allowed-methods",
        ),
        absent(
            subjects.WATERMARK,
            "--watermark-config",
        ),
        absent(
            subjects.SERVER_TOOLS,
            "--tool-server",
            "VLLM_GPT_OSS_SYSTEM_TOOL_MCP_LABELS",
        ),
        absent(
            subjects.TOOLS,
            "--exclude-tools-when-tool-choice-none --tool-parser-plugin --tool-strict-level",
            "VLLM_ENFORCE_STRICT_TOOL_CALLING VLLM_TOOL_JSON_ERROR_AUTOMATIC_RETRY "
            "VLLM_TOOL_PARSE_REGEX_TIMEOUT_SECONDS",
        ),
        absent(
            subjects.REASONING,
            "--anthropic-disabled-thinking-effort --cohere-is-reasoning-model --enable-reasoning "
            "--reasoning-config --reasoning-effort-map --reasoning-parser --reasoning-parser-plugin",
        ),
        absent(
            subjects.TEMPLATE_DEFAULTS,
            "--default-chat-template-kwargs",
        ),
        absent(
            subjects.TEMPLATES,
            "--chat-template-content-format --cohere-format --trust-request-chat-template",
            "VLLM_CHAT_TEMPLATE_FUEL VLLM_CHAT_TEMPLATE_RENDER_TIMEOUT "
            "VLLM_COHERE2_ATTN_MOE_DUAL_STREAM_TOKEN_THRESHOLD VLLM_ENABLE_COHERE_API "
            "VLLM_GPT_OSS_HARMONY_SYSTEM_INSTRUCTIONS",
        ),
        absent(
            subjects.STRUCTURED,
            "--guided-decoding-disable-additional-properties --guided-decoding-disable-any-whitespace "
            "--guided-decoding-disable-fallback --structured-outputs-config",
            "VLLM_V1_USE_OUTLINES_CACHE VLLM_XGRAMMAR_CACHE_MB",
        ),
        absent(
            subjects.USER_CODE,
            "--code-revision --io-processor-plugin --logits-processor-pattern --logits-processors --middleware "
            "--scheduler-cls --worker-cls --worker-extension-cls",
            "VLLM_PLUGINS VLLM_RUST_FRONTEND_PATH VLLM_USE_RUST_FRONTEND",
        ),
        absent(
            subjects.DIFFUSION,
            "--diffusion-config --monokernel -dc",
        ),
        absent(
            subjects.TRAINING,
            "--aux-output-config --enable-return-routed-experts --enable-trace-replay --return-sampling-mask",
        ),
        absent(
            subjects.MEDIA,
            "--allowed-local-media-path --allowed-media-domains --disable-chunked-mm-input "
            "--disable-mm-preprocessor-cache --enable-mm-embeds --interleave-mm-strings --limit-mm-per-prompt "
            "--media-io-kwargs --mm-device-do-normalize --mm-disable-profiling --mm-encoder-attn-backend "
            "--mm-encoder-attn-dtype --mm-encoder-fp8-scale-path --mm-encoder-fp8-scale-save-margin "
            "--mm-encoder-fp8-scale-save-path --mm-encoder-only --mm-encoder-tp-mode --mm-hasher-algorithm "
            "--mm-ipc-gpu-memory-gb --mm-processor-cache-gb --mm-processor-cache-type --mm-processor-device "
            "--mm-processor-kwargs --mm-shm-cache-max-object-size-mb --mm-tensor-ipc --skip-mm-profiling "
            "--trust-request-mm-kwargs --video-pruning-method --video-pruning-rate",
            "VLLM_AUDIO_FETCH_TIMEOUT VLLM_IMAGE_FETCH_TIMEOUT VLLM_IMAGE_TAG VLLM_MAX_AUDIO_CLIP_FILESIZE_MB "
            "VLLM_MAX_AUDIO_DECODE_BYTES VLLM_MAX_AUDIO_DECODE_DURATION_S VLLM_MAX_AUDIO_PREPROCESS_WORKERS "
            "VLLM_MAX_IMAGE_PIXELS VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB VLLM_MAX_MEDIA_REQUEST_DECODE_BYTES "
            "VLLM_MAX_MEDIA_REQUEST_DOWNLOAD_SIZE_MB VLLM_MEDIA_CACHE VLLM_MEDIA_CACHE_MAX_SIZE_MB "
            "VLLM_MEDIA_CACHE_TTL_HOURS VLLM_MEDIA_CONNECTOR VLLM_MEDIA_FETCH_MAX_RETRIES "
            "VLLM_MEDIA_LOADING_THREAD_COUNT VLLM_MEDIA_URL_ALLOW_REDIRECTS VLLM_MM_HASHER_ALGORITHM "
            "VLLM_VIDEO_FETCH_TIMEOUT VLLM_VIDEO_LOADER_BACKEND",
        ),
        absent(
            subjects.ROPE,
            "--rope-scaling --rope-theta",
            "VLLM_ROCM_USE_AITER_TRITON_ROPE",
        ),
        absent(
            subjects.TOKENIZER,
            "--skip-tokenizer-init --tokenizer --tokenizer-pool-extra-config --tokenizer-pool-size "
            "--tokenizer-pool-type --tokenizer-revision",
        ),
        absent(
            subjects.GGUF,
            "",
            "VLLM_USE_MODELSCOPE",
        ),
        absent(
            subjects.SAMPLING,
            "--logprobs-mode --override-generation-config",
        ),
        absent(
            subjects.SLEEP,
            "--enable-sleep-mode --sleep-mode-backend --sleep-mode-offload-cudagraph "
            "--sleep-preserve-parameter-names",
            "VLLM_ROCM_SLEEP_MEM_CHUNK_SIZE",
        ),
        absent(
            subjects.WEIGHT_UPDATES,
            "--weight-transfer-config",
            "VLLM_MODEL_REDIRECT_PATH",
        ),
        absent(
            subjects.KV_TRANSFER,
            "--ec-manager-config --ec-transfer-config --enable-fault-tolerance --engram-config "
            "--fault-tolerance-config --kv-events-config --kv-transfer-config",
            "VLLM_EC_SIDE_CHANNEL_HOST VLLM_EC_SIDE_CHANNEL_PORT VLLM_KV_EVENTS_USE_INT_BLOCK_HASHES "
            "VLLM_MOONCAKE_ABORT_REQUEST_TIMEOUT VLLM_MOONCAKE_BOOTSTRAP_PORT VLLM_MOONCAKE_CONNECTOR_TIMEOUT "
            "VLLM_MOONCAKE_DISK_STAGING_USABLE_RATIO VLLM_MOONCAKE_LOAD_RECV_THREADS VLLM_MOONCAKE_STORE_TIER_LOG "
            "VLLM_NIXL_EP_MAX_NUM_RANKS VLLM_NIXL_SIDE_CHANNEL_HOST VLLM_NIXL_SIDE_CHANNEL_PORT "
            "VLLM_P2P_HANDSHAKE_TIMEOUT_S VLLM_P2P_IDLE_TIMEOUT_S VLLM_P2P_MAX_PEERS VLLM_P2P_SIDE_CHANNEL_HOST "
            "VLLM_P2P_SIDE_CHANNEL_PORT",
        ),
        absent(
            subjects.OFFLOAD,
            "--cpu-offload-gb --cpu-offload-params --kv-offloading-backend --kv-offloading-size --offload-backend "
            "--offload-group-size --offload-num-in-group --offload-params --offload-prefetch-step --swap-space",
            "VLLM_CPU_MOE_PREPACK VLLM_KV_OFFLOAD_MAX_BATCH_DESCRIPTORS VLLM_USE_SIMPLE_KV_OFFLOAD "
            "VLLM_WEIGHT_OFFLOADING_DISABLE_PIN_MEMORY VLLM_WEIGHT_OFFLOADING_DISABLE_UVA",
        ),
        absent(
            subjects.OTHER_LAYERS,
            "--enable-hc-sp --enable-mamba-cache-stochastic-rounding --enable-mamba-shared-prefix-checkpoint "
            "--gdn-prefill-backend --kda-decode-backend --kda-prefill-backend --mamba-backend --mamba-block-size "
            "--mamba-cache-dtype --mamba-cache-mode --mamba-cache-philox-rounds --mamba-ssm-cache-dtype "
            "--mamba-ssu-algorithm --replayssm-buffer-len --swa-bounded-replay --use-replayssm",
            "VLLM_ENABLE_FLA_PACKED_RECURRENT_DECODE VLLM_GDN_DECODE_KERNEL VLLM_SSM_CONV_STATE_LAYOUT",
        ),
        absent(
            subjects.NODES,
            "--cpu-distributed-timeout-seconds --data-parallel-address --data-parallel-backend "
            "--data-parallel-external-lb --data-parallel-hybrid-lb --data-parallel-multi-port-external-lb "
            "--data-parallel-rank --data-parallel-rpc-port --data-parallel-size-local --data-parallel-start-rank "
            "--data-parallel-supervisor-port --disable-nccl-for-dp-synchronization --distributed-timeout-seconds "
            "--dp-supervisor-probe-failure-threshold --dp-supervisor-probe-interval-s "
            "--dp-supervisor-probe-timeout-s --dp-sync-interval --elastic-ep-max-dp-size --enable-elastic-ep "
            "--engine-use-ray --headless --master-addr --master-port --ray-workers-use-nsight --worker-use-ray "
            "-dpa -dpb -dpe -dph -dpl -dpm -dpn -dpp -dpr",
            "VLLM_DISTRIBUTED_USE_SPLIT_GROUP VLLM_DP_MASTER_IP VLLM_DP_MASTER_PORT VLLM_DP_RANK "
            "VLLM_DP_RANK_LOCAL VLLM_DP_SIZE VLLM_ELASTIC_EP_DRAIN_REQUESTS VLLM_ELASTIC_EP_SCALE_UP_LAUNCH "
            "VLLM_LOOPBACK_IP VLLM_RAY_BUNDLE_INDICES VLLM_RAY_DP_PACK_STRATEGY VLLM_RAY_DP_PLACEMENT_NODE_IPS "
            "VLLM_RAY_EXTRA_ENV_VARS_TO_COPY VLLM_RAY_EXTRA_ENV_VAR_PREFIXES_TO_COPY VLLM_RAY_PER_WORKER_GPUS "
            "VLLM_RPC_BASE_PATH VLLM_USE_RAY_COMPILED_DAG_CHANNEL_TYPE VLLM_USE_RAY_COMPILED_DAG_OVERLAP_COMM "
            "VLLM_USE_RAY_V2_EXECUTOR_BACKEND VLLM_USE_RAY_WRAPPED_PP_COMM",
        ),
        absent(
            subjects.PIPELINE,
            "--all2all-backend --cp-kv-cache-interleave-size --dbo-decode-token-threshold "
            "--dbo-prefill-token-threshold --dcp-comm-backend --dcp-kv-cache-interleave-size --dcp-q-replicate "
            "--enable-dbo --enable-ep-weight-filter --enable-eplb --enable-expert-parallel --eplb-config "
            "--expert-placement-strategy --ubatch-size -ep",
            "VLLM_DBO_COMM_SMS VLLM_DCP_Q_REPLICATE VLLM_DEEPEPLL_NVFP4_DISPATCH VLLM_DEEPEP_BUFFER_SIZE_MB "
            "VLLM_DEEPEP_HIGH_THROUGHPUT_FORCE_INTRA_NODE VLLM_DEEPEP_LOW_LATENCY_USE_MNNVL "
            "VLLM_DEEPEP_V2_ALLOW_HYBRID_MODE VLLM_DEEPEP_V2_ALLOW_MULTIPLE_REDUCTION "
            "VLLM_DEEPEP_V2_PREFER_OVERLAP VLLM_DISABLE_DSV4_MEGAMOE_SHARED_EXPERT_FUSION "
            "VLLM_DISABLE_SHARED_EXPERTS_STREAM VLLM_FLASHINFER_MOE_A2A_LOW_PRECISION_COMBINE "
            "VLLM_KIMI_K3_SHARD_SP_SHARED_EXPERT VLLM_MAX_TOKENS_PER_EXPERT_FP4_MOE "
            "VLLM_MOE_ROUTING_SIMULATION_STRATEGY VLLM_PP_LAYER_PARTITION VLLM_ROCM_AITER_MOE_DISPATCH_POLICY "
            "VLLM_ROCM_USE_AITER_FUSION_SHARED_EXPERTS VLLM_SHARED_EXPERTS_STREAM_TOKEN_THRESHOLD "
            "VLLM_STEP5_SHARD_SP_SHARED_EXPERT VLLM_USE_DIRECT_DCP_A2A VLLM_USE_DIRECT_DCP_KV_GATHER "
            "VLLM_USE_DIRECT_DCP_Q_GATHER VLLM_XPU_PP_MICROBATCH",
        ),
        absent(
            subjects.MODEL_OVERRIDE,
            "--disable-sliding-window --hf-config-path --hf-overrides --max-seq-len --model-class-overrides "
            "--override-attention-dtype --override-neuron-config",
            "VLLM_ALLOW_LONG_MAX_MODEL_LEN VLLM_TEST_FORCE_LOAD_FORMAT VLLM_USE_V2_MODEL_RUNNER",
        ),
        absent(
            subjects.QUANTIZATION,
            "--allow-deprecated-quantization --quantization-config --quantization-param-path",
            "VLLM_B12X_MOE_FP4_FORCE_A16 VLLM_CPU_INT4_W4A8 VLLM_HUMMING_INPUT_QUANT_CONFIG "
            "VLLM_HUMMING_ONLINE_QUANT_CONFIG VLLM_MARLIN_INPUT_DTYPE VLLM_MARLIN_USE_ATOMIC_ADD "
            "VLLM_MXFP4_EMULATION_DEQUANT_AT_LOAD VLLM_MXFP8_EMULATION_DEQUANT_AT_LOAD VLLM_ROCM_FP8_PADDING "
            "VLLM_ROCM_MUSE_MOE_ONLINE_QUANT VLLM_ROCM_QUICK_REDUCE_QUANTIZATION "
            "VLLM_ROCM_QUICK_REDUCE_QUANTIZATION_MIN_SIZE_KB VLLM_ROCM_USE_AITER_FP4BMM "
            "VLLM_ROCM_USE_AITER_FP4_ASM_GEMM VLLM_TEST_FORCE_FP8_MARLIN VLLM_USE_FLASHINFER_MOE_INT4 "
            "VLLM_USE_TRITON_AWQ",
        ),
        absent(
            subjects.KV_FORMATS,
            "--calculate-kv-scales --kv-cache-dtype-skip-layers",
        ),
        absent(
            subjects.CACHE_TUNING,
            "--disable-hybrid-kv-cache-manager --kv-sharing-fast-prefill --prefix-cache-retention-interval "
            "--prefix-caching-hash-algo --prefix-match-unit --use-v2-block-manager",
            "VLLM_ALLOW_CHUNKED_LOCAL_ATTN_WITH_HYBRID_KV_CACHE VLLM_KEEP_ALIVE_ON_ENGINE_DEATH "
            "VLLM_LOGGING_PREFIX VLLM_PREFIX_CACHE_RETENTION_INTERVAL VLLM_PROCESS_NAME_PREFIX",
        ),
        absent(
            subjects.SCHEDULING,
            "--long-prefill-token-threshold --long-prefill-token-threshold-adaptive --max-long-partial-prefills "
            "--max-num-on-the-fly --max-num-partial-prefills --multi-step-stream-outputs --num-scheduler-steps "
            "--preemption-mode --prefill-schedule-interval --scheduler-delay-factor --scheduler-reserve-full-isl "
            "--watermark",
            "VLLM_MQ_MAX_CHUNK_BYTES_MB VLLM_V1_OUTPUT_PROC_CHUNK_SIZE",
        ),
        absent(
            subjects.LIMITS,
            "--max-logprobs",
            "VLLM_ENGINE_READY_TIMEOUT_S VLLM_MAX_BAD_WORDS_TOTAL_TOKENS VLLM_MAX_COMPLETION_PROMPTS "
            "VLLM_MAX_NUM_BAD_WORDS VLLM_MAX_N_SEQUENCES VLLM_MAX_STOP_STRINGS VLLM_REGEX_COMPILATION_TIMEOUT_S "
            "VLLM_WORKER_SHUTDOWN_TIMEOUT_SECONDS",
        ),
        absent(
            subjects.COMPILATION,
            "--compilation-config --cuda-graph-sizes --cudagraph-capture-sizes --cudagraph-metrics "
            "--jit-monitor-mode --jit-monitor-verbose --max-context-len-to-capture --max-cudagraph-capture-size "
            "--max-seq-len-to-capture -cc",
            "VLLM_COMPILE_CACHE_SAVE_FORMAT VLLM_DISABLE_COMPILE_CACHE VLLM_ENABLE_CUDAGRAPH_GC "
            "VLLM_ENABLE_INDUCTOR_COORDINATE_DESCENT_TUNING VLLM_ENABLE_INDUCTOR_MAX_AUTOTUNE VLLM_FORCE_AOT_LOAD "
            "VLLM_MEMORY_PROFILER_ESTIMATE_CUDAGRAPHS VLLM_TRITON_FORCE_FIRST_CONFIG "
            "VLLM_TRITON_JIT_WARMUP_NUM_THREADS VLLM_USE_AOT_COMPILE VLLM_USE_BREAKABLE_CUDAGRAPH "
            "VLLM_USE_MEGA_AOT_ARTIFACT VLLM_USE_STANDALONE_COMPILE VLLM_XPU_ENABLE_XPU_GRAPH",
        ),
        absent(
            subjects.KERNELS,
            "--attention-backend --attention-config --disable-custom-all-reduce --enable-flashinfer-autotune "
            "--enable-nccl-comm-suspend --ir-op-priority --kernel-config --linear-backend --moe-backend "
            "--sparse-indexer-topk-backend --use-fp64-gumbel -ac",
            "VLLM_ALLREDUCE_USE_FLASHINFER VLLM_ALLREDUCE_USE_FLASHINFER_PCIE_IPC VLLM_ALLREDUCE_USE_SYMM_MEM "
            "VLLM_BLOCKSCALE_FP8_GEMM_FLASHINFER VLLM_CI_USE_S3 VLLM_COMPUTE_NANS_IN_LOGITS "
            "VLLM_CPU_ATTN_SPLIT_KV VLLM_CPU_SGL_KERNEL VLLM_DEEP_GEMM_WARMUP VLLM_DISABLED_KERNELS "
            "VLLM_ENABLE_GEMM_RS VLLM_FLASHINFER_ALLREDUCE_BACKEND VLLM_FLASHINFER_ALLREDUCE_FUSION_THRESHOLDS_MB "
            "VLLM_FLASHINFER_AUTOTUNE_CACHE_DIR VLLM_FLASHINFER_AUTOTUNE_SKIP_OPS "
            "VLLM_FLASHINFER_WORKSPACE_BUFFER_SIZE VLLM_FLOAT32_MATMUL_PRECISION VLLM_HAS_FLASHINFER_CUBIN "
            "VLLM_HUMMING_MOE_GEMM_TYPE VLLM_HUMMING_USE_F16_ACCUM VLLM_KIMI_K3_AUX_ATTN_RES_STREAM "
            "VLLM_KIMI_K3_GEMM_AR VLLM_MLA_DISABLE VLLM_MOE_SKIP_PADDING VLLM_MOE_USE_DEEP_GEMM "
            "VLLM_MULTI_STREAM_GEMM_TOKEN_THRESHOLD VLLM_NCCL_INCLUDE_PATH VLLM_NCCL_SO_PATH "
            "VLLM_RAISE_ON_LOGIT_NANS VLLM_ROCM_AITER_MLA_ASM_PADDING VLLM_ROCM_FP8_MFMA_PAGE_ATTN "
            "VLLM_ROCM_MOE_PADDING VLLM_ROCM_MUSE_MOE_REDUCE_DTYPE VLLM_ROCM_QUICK_REDUCE_CAST_BF16_TO_FP16 "
            "VLLM_ROCM_USE_AITER VLLM_ROCM_USE_AITER_CUSTOM_AR VLLM_ROCM_USE_AITER_FP8BMM "
            "VLLM_ROCM_USE_AITER_LINEAR VLLM_ROCM_USE_AITER_LINEAR_HIPBMM VLLM_ROCM_USE_AITER_MHA "
            "VLLM_ROCM_USE_AITER_MLA VLLM_ROCM_USE_AITER_MOE VLLM_ROCM_USE_AITER_MOE_A4W4_DSV4 "
            "VLLM_ROCM_USE_AITER_MOE_SITUV2 VLLM_ROCM_USE_AITER_PAGED_ATTN VLLM_ROCM_USE_AITER_RMSNORM "
            "VLLM_ROCM_USE_AITER_TRITON_GEMM VLLM_ROCM_USE_AITER_TRITON_SPARSE_MLA "
            "VLLM_ROCM_USE_AITER_UNIFIED_ATTENTION VLLM_ROCM_USE_SKINNY_GEMM VLLM_TRITON_ATTN_USE_TD "
            "VLLM_TRITON_USE_TD VLLM_USE_BYTECODE_HOOK VLLM_USE_DEEP_GEMM VLLM_USE_DEEP_GEMM_E8M0 "
            "VLLM_USE_DEEP_GEMM_TMA_ALIGNED_SCALES VLLM_USE_EXPERIMENTAL_PARSER_CONTEXT VLLM_USE_FASTOKENS "
            "VLLM_USE_FLASHINFER_SAMPLER VLLM_USE_FUSED_MOE_GROUPED_TOPK VLLM_USE_HW_AGNOSTIC VLLM_USE_LAYERNAME "
            "VLLM_USE_NCCL_SYMM_MEM VLLM_USE_OINK_OPS VLLM_USE_PRECOMPILED VLLM_USE_PRECOMPILED_RUST "
            "VLLM_USE_RUST_BENCH VLLM_USE_SPINLOOP_EXT VLLM_XLA_USE_SPMD VLLM_XPU_INC_WNA16_BACKEND "
            "VLLM_XPU_USE_SAMPLER_KERNEL",
        ),
        absent(
            subjects.PLACEMENT,
            "--numa-bind --numa-bind-cpus --numa-bind-nodes",
            "VLLM_SERVER_DEV_MODE",
        ),
        absent(
            subjects.LOADING,
            "--enable-shm-tensor-arena --ignore-patterns --max-parallel-loading-workers "
            "--model-loader-extra-config --pt-load-map-location --safetensors-load-strategy "
            "--safetensors-prefetch-block-size --safetensors-prefetch-num-threads --use-tqdm-on-load",
            "VLLM_FASTSAFETENSORS_QUEUE_SIZE VLLM_ZENTORCH_WEIGHT_PREPACK",
        ),
        absent(
            subjects.LOGGING,
            "--aggregate-engine-logging --disable-access-log-for-endpoints --enable-log-deltas "
            "--enable-log-outputs --enable-logging-iteration-details --log-config-file --log-error-stack "
            "--logging-config --max-log-len",
            "VLLM_CONFIGURE_LOGGING VLLM_DEBUG_LOG_API_SERVER_RESPONSE VLLM_DISABLE_LOG_LOGO VLLM_LOGGING_COLOR "
            "VLLM_LOGGING_CONFIG_PATH VLLM_LOGGING_STREAM VLLM_LOG_BATCHSIZE_INTERVAL VLLM_LOG_MODEL_INSPECTION "
            "VLLM_LOG_STATS_INTERVAL VLLM_REQUEST_BODY_LOG_LEVEL VLLM_SPARSE_INDEXER_MAX_LOGITS_MB",
        ),
        absent(
            subjects.METRICS,
            "--collect-detailed-traces --custom-histogram-buckets --enable-layerwise-nvtx-tracing "
            "--enable-mfu-metrics --enable-per-request-metrics --kv-cache-metrics --kv-cache-metrics-sample "
            "--show-hidden-metrics-for-version",
            "VLLM_DEBUG_MFU_METRICS VLLM_NVTX_SCOPES_FOR_PROFILING VLLM_TPU_BUCKET_PADDING_GAP "
            "VLLM_TRACE_FUNCTION VLLM_USAGE_STATS_SERVER",
        ),
        absent(
            subjects.DEBUGGING,
            "--profiler-config",
            "VLLM_ADAPTIVE_VERIFICATION_PROFILE_CONTEXT_LEN VLLM_CUSTOM_SCOPES_FOR_PROFILING VLLM_DEBUG_DUMP_PATH "
            "VLLM_DEBUG_WORKSPACE VLLM_GC_DEBUG VLLM_GPU_SYNC_CHECK VLLM_PATTERN_MATCH_DEBUG VLLM_SKIP_P2P_CHECK "
            "VLLM_XLA_CHECK_RECOMPILATION",
        ),
        absent(
            subjects.PAGE,
            "--disable-fastapi-docs --enable-offline-docs",
        ),
        absent(
            subjects.ROUTES,
            "--disable-async-output-proc --enable-force-include-usage --enable-prompt-embeds --enable-scale-out "
            "--enable-server-load-tracking --enable-tokenizer-info-endpoint --fingerprint-mode "
            "--fingerprint-value --return-tokens-as-token-ids --sse-keep-alive-interval --tokens-only",
            "VLLM_BEAM_ALWAYS_CONSTRAIN_OUTPUT VLLM_DISABLE_REQUEST_ID_RANDOMIZATION "
            "VLLM_ENABLE_RESPONSES_API_STORE VLLM_REPLICATE_EMBED VLLM_USAGE_SOURCE",
        ),
        absent(
            subjects.LISTENING,
            "--grpc --grpc-port --uds",
        ),
        absent(
            subjects.PROCESSES,
            "--disable-frontend-multiprocessing --enable-cumem-allocator --fail-on-environ-validation "
            "--renderer-num-workers --watchdog-config",
            "VLLM_ASSETS_CACHE VLLM_ASSETS_CACHE_MODEL_CLEAN VLLM_BUILD_COMMIT VLLM_BUILD_PIPELINE VLLM_BUILD_URL "
            "VLLM_CACHE_ROOT VLLM_CONFIG_ROOT VLLM_CUDART_SO_PATH VLLM_CUDA_COMPATIBILITY_PATH "
            "VLLM_ENABLE_STARTUP_PLAN VLLM_KV_CACHE_LAYOUT VLLM_MAIN_CUDA_VERSION VLLM_OBJECT_STORAGE_SHM_BUFFER "
            "VLLM_OBJECT_STORAGE_SHM_BUFFER_NAME VLLM_ROCM_QUICK_REDUCE_MAX_SIZE_BYTES_MB "
            "VLLM_ROCM_QUICK_REDUCE_MIN_SIZE_BYTES_MB VLLM_ROCM_SHUFFLE_KV_CACHE_LAYOUT "
            "VLLM_SKIP_PRECOMPILED_VERSION_SUFFIX VLLM_SKIP_VERSION_SUFFIX VLLM_TPU_USING_PATHWAYS "
            "VLLM_WORKER_MULTIPROC_METHOD VLLM_WSL2_ENABLE_PIN_MEMORY VLLM_XLA_CACHE_PATH",
        ),
        absent(
            subjects.OTHER,
            "--additional-config --enable-batch-sharded-sampling",
            "VLLM_ALLOW_INSECURE_SERIALIZATION VLLM_CPU_CI_ENV VLLM_DISABLE_PYNCCL VLLM_DOCKER_BUILD_CONTEXT "
            "VLLM_ENABLE_CUDA_COMPATIBILITY VLLM_ENABLE_HPC_OPS VLLM_ENABLE_PREGRAD_PASSES "
            "VLLM_ENABLE_V1_MULTIPROCESSING VLLM_GPU_NIC_PCIE_MAPPING VLLM_MAX_EMBED_DECODE_BYTES "
            "VLLM_MSGPACK_ZERO_COPY_THRESHOLD VLLM_NIC_SELECTION_VARS VLLM_PRECOMPILED_WHEEL_LOCATION "
            "VLLM_RANDOMIZE_DP_DUMMY_INPUTS VLLM_RINGBUFFER_WARNING_INTERVAL VLLM_SKIP_MODEL_NAME_VALIDATION "
            "VLLM_SYSTEM_START_DATE VLLM_TPU_MOST_MODEL_LEN VLLM_TUNED_CONFIG_FOLDER "
            "VLLM_XPU_FORCE_N_CONTIG_WEIGHT",
        ),
    ),
    prefix="VLLM_",
)  # fmt: skip

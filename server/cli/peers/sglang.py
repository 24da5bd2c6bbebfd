"""The flags and environment variables of SGLang, 0.5.10 to 0.5.23."""

from __future__ import annotations

from typing import Final

from server.cli.peers import common, forms, subjects
from server.cli.peers.answers import Peer, absent, always, near, understood

SGLANG: Final = Peer(
    "SGLang",
    (
        understood("model", "--model-path --model"),
        understood("revision", "--revision"),
        understood("served_model_name", "--served-model-name"),
        understood("chat_template", "--chat-template"),
        understood("tool_call_format", "--tool-call-parser"),
        understood("host", "--host"),
        understood("port", "--port"),
        understood("dtype", "--dtype"),
        understood("device", "--device"),
        understood("quantization", "--quantization"),
        understood("load_format", "--load-format"),
        understood("model_backend", "--model-impl"),
        understood("kv_cache_dtype", "--kv-cache-dtype"),
        understood("max_model_len", "--context-length"),
        understood("lora_modules", "--lora-paths", form=forms.named_adapters),
        understood("max_loras", "--max-loras-per-batch"),
        understood("max_lora_rank", "--max-lora-rank"),
        understood("max_cpu_loras", "--max-loaded-loras"),
        understood("max_num_seqs", "--max-running-requests"),
        understood("max_draft_tokens", "--speculative-num-draft-tokens"),
        near(common.DRAFTS, "--speculative-algorithm"),
        understood("max_prefill_tokens", "--max-prefill-tokens"),
        understood("kv_cache_tokens", "--max-total-tokens"),
        understood("block_size", "--page-size"),
        understood("tensor_parallel", "--tensor-parallel-size --tp-size --tp"),
        understood("data_parallel", "--data-parallel-size --dp-size --dp"),
        understood("cuda_graphs", "--disable-cuda-graph", form=forms.off, takes="nothing"),
        understood("overlap", "--disable-overlap-schedule", form=forms.off, takes="nothing"),
        understood("enable_prefix_caching", "--disable-radix-cache", form=forms.off, takes="nothing"),
        understood("deterministic", "--enable-deterministic-inference", form=forms.on, takes="nothing"),
        understood("log_level", "--log-level", form=forms.lower),
        understood("api_key", "--api-key"),
        understood("keep_alive_timeout", "", "SGLANG_TIMEOUT_KEEP_ALIVE"),
        always(common.NO_REMOTE_CODE, "--trust-remote-code", either=True),
        always(common.METRICS, "--enable-metrics"),
        always("usage has prompt_tokens_details", "--enable-cache-report"),
        always("kernels are compiled and the largest step is measured before requests are served",
               "--skip-server-warmup", either=True),
        near("requests may have a priority, of which the lower number goes first", "--enable-priority-scheduling",
             takes="nothing"),
        always("tokenizer.json of the checkpoint is read", "--tokenizer-mode", only="auto", takes="value"),
        always("requests are served by priority and then in the order of arrival", "--schedule-policy", only="fcfs",
               takes="value"),
        always("each token is sent when it is computed", "--stream-interval", only="1", takes="value"),
        always(common.CONSTRAINTS, "--grammar-backend", only="llguidance", takes="value"),
        always(common.ONE_MACHINE, "--nnodes", only="1", takes="value"),
        always(common.ONE_MACHINE, "--node-rank", only="0", takes="value"),
        always(common.ONE_STAGE, "--pipeline-parallel-size --pp-size --pp --expert-parallel-size --ep-size --ep "
               "--attn-cp-size --attention-context-parallel-size --dcp-size --decode-context-parallel-size",
               only="1", takes="value"),
        always("the first GPU is used", "--base-gpu-id", only="0", takes="value"),
        always("sampling parameters come from generation_config.json where requests set none", "--sampling-defaults",
               only="model", takes="value"),
        always("computed prefixes that were not used for the longest time go first", "--radix-eviction-policy",
               only="lru", takes="value"),
        near("--gpu-memory-utilization is the share of a GPU's memory for all; SGLang's leaves out activations and "
             "recorded steps", "--mem-fraction-static"),
        near("--max-num-batched-tokens limits the tokens of a step, and so of a chunk", "--chunked-prefill-size"),
        near("--max-concurrent-requests limits the requests in progress, running and queued", "--max-queued-requests"),
        near("--frontends sets the number of processes for HTTP and tokenizing",
             "--tokenizer-worker-num --detokenizer-worker-num"),
        near(common.SEED, "--random-seed"),
        near(common.HUB_FOLDER, "--download-dir"),
        near(common.OTLP, "--otlp-traces-endpoint"),
        near("--otlp-endpoint switches traces on", "--enable-trace", takes="nothing"),
        near(common.ACCESS_LOG, "--log-requests", takes="nothing"),
        near("--log-level is that of all messages", "--log-level-http"),
        near("adapters are on with --lora-modules, --lora-folder or --max-loras", "--enable-lora", takes="nothing"),
        near("--engine-hang-seconds limits a step", "--watchdog-timeout --soft-watchdog-timeout"),
        near("--max-queue-seconds limits the time in the queue", "", "SGLANG_REQ_WAITING_TIMEOUT"),
        near("--cors-allow-origin, --api-key and --allowed-hosts decide who may use the service", "--admin-api-key"),
        near("--host and --port are the address to listen on", "", "SGLANG_HOST_IP SGLANG_PORT"),
        near("a language model without its other parts is served where `tessera plan MODEL` works",
             "--language-model-only --language-only", takes="nothing"),
        # The rest is not in Tessera.
        absent(
            subjects.LORA,
            "--enable-lora-overlap-loading --experts-shared-outer-loras --lora-backend "
            "--lora-drain-wait-threshold --lora-eviction-policy --lora-strict-loading "
            "--lora-target-modules --lora-use-virtual-experts --max-lora-chunk-size --uno-lora-path",
        ),
        absent(
            subjects.SPECULATION,
            "--decoupled-spec-bind-endpoint --decoupled-spec-connect-endpoints --decoupled-spec-rank "
            "--decoupled-spec-role --decrypted-draft-config-file --enable-draft-weights-cpu-backup "
            "--enable-multi-layer-eagle --spec-trace-dir --speculative-accept-threshold-acc "
            "--speculative-accept-threshold-single --speculative-adaptive --speculative-adaptive-config "
            "--speculative-attention-mode --speculative-boundary-reduction "
            "--speculative-dflash-block-size --speculative-domino-candidate-pool-size "
            "--speculative-draft-attention-backend --speculative-draft-kv-cache-dtype "
            "--speculative-draft-load-format --speculative-draft-model --speculative-draft-model-path "
            "--speculative-draft-model-quantization --speculative-draft-model-revision "
            "--speculative-draft-sink-size --speculative-draft-window-size --speculative-dsa-topk-backend "
            "--speculative-dspark-align-verify-tokens-to-graph-tier --speculative-dspark-block-size "
            "--speculative-dspark-confidence-sts-path --speculative-dspark-sps-table-path "
            "--speculative-eagle-topk --speculative-enable-w4a4-mxfp4-megamoe --speculative-moe-a2a-backend "
            "--speculative-moe-runner-backend --speculative-ngram-capacity "
            "--speculative-ngram-external-corpus-max-tokens --speculative-ngram-external-corpus-path "
            "--speculative-ngram-external-sam-budget --speculative-ngram-match-type "
            "--speculative-ngram-max-bfs-breadth --speculative-ngram-max-trie-depth "
            "--speculative-ngram-min-bfs-breadth --speculative-num-steps "
            "--speculative-token-map --speculative-use-block-verification --speculative-use-rejection-sampling",
            "SGLANG_NGRAM_FORCE_GREEDY_VERIFY SGLANG_SPEC_EXPANSION_SAFETY_FACTOR",
        ),
        absent(
            subjects.POOLING,
            "--enable-mis --is-embedding --multi-item-scoring-delimiter",
        ),
        absent(
            subjects.TLS,
            "--enable-ssl-refresh --ssl-ca-certs --ssl-certfile --ssl-keyfile --ssl-keyfile-password",
        ),
        absent(
            subjects.PATH_PREFIX,
            "--fastapi-root-path",
        ),
        absent(
            subjects.WATERMARK,
            "--enable-watermark --watermark-config --watermark-context-window --watermark-default-enabled "
            "--watermark-enforce-all --watermark-key --watermark-key-b --watermark-max-probability "
            "--watermark-mixing-probability",
        ),
        absent(
            subjects.SERVER_TOOLS,
            "--tool-server",
        ),
        absent(
            subjects.TOOLS,
            "",
            "SGLANG_FORWARD_UNKNOWN_TOOLS SGLANG_TOOL_STRICT_LEVEL",
        ),
        absent(
            subjects.REASONING,
            "--enable-strict-thinking --reasoning-parser --strip-thinking-cache",
        ),
        absent(
            subjects.TEMPLATE_DEFAULTS,
            "--default-chat-template-kwargs",
        ),
        absent(
            subjects.TEMPLATES,
            "--completion-template --hf-chat-template-name --trust-request-chat-template",
        ),
        absent(
            subjects.STRUCTURED,
            "--constrained-json-disable-any-whitespace --constrained-json-max-whitespace-cnt "
            "--constrained-json-whitespace-pattern --disable-outlines-disk-cache",
            "SGLANG_DISABLE_OUTLINES_DISK_CACHE",
        ),
        absent(
            subjects.USER_CODE,
            "--custom-sigquit-handler --custom-weight-loader --enable-custom-logit-processor --forward-hooks",
        ),
        absent(
            subjects.DIFFUSION,
            "--dllm-algorithm --dllm-algorithm-config --dllm-fdfo --enable-amd-monokernel "
            "--enable-nvidia-megakernel --monokernel-backend",
        ),
        absent(
            subjects.TRAINING,
            "--aux-hidden-state-capture --enable-return-aux-hidden-states --enable-return-hidden-states "
            "--enable-return-indexer-topk --enable-return-routed-experts --return-aux-hidden-state-layer-ids "
            "--return-hidden-states-mode --rl-on-policy-target --rl-quant-profile --sampling-mask-max-tokens",
        ),
        absent(
            subjects.MEDIA,
            "--allowed-media-domains --asr-max-buffer-seconds --asr-max-concurrent-sessions "
            "--disable-fast-image-processor --enable-broadcast-mm-inputs-process --enable-mm-global-cache "
            "--enable-multimodal --enable-prefix-mm-cache --image-processor-backend --keep-mm-feature-on-device "
            "--limit-mm-data-per-request --media-url-max-file-size-mb --mm-attention-backend "
            "--mm-enable-dp-encoder --mm-feature-transport --mm-global-cache-backend --mm-io-worker-num "
            "--mm-preprocess-cache-size-mb --mm-process-config --mm-processor-worker-num "
            "--trust-mm-content-hashes",
            "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION SGLANG_ENCODER_MM_RECEIVER_MODE SGLANG_EXTERNAL_MM_MODEL_ARCH "
            "SGLANG_EXTERNAL_MM_PROCESSOR_PACKAGE SGLANG_IMAGE_MAX_PIXELS SGLANG_MM_BUFFER_SIZE_MB "
            "SGLANG_MM_FEATURE_CACHE_MB SGLANG_MM_ITEM_MEM_POOL_RECYCLE_INTERVAL_SEC SGLANG_MM_PRECOMPUTE_HASH "
            "SGLANG_MM_SKIP_COMPUTE_HASH SGLANG_VIT_ENABLE_CUDA_GRAPH SGLANG_VLM_CACHE_SIZE_MB",
        ),
        absent(
            subjects.ROPE,
            "",
            "SGLANG_ROPE_CACHE_ALIGN SGLANG_ROPE_CACHE_SAFETY_MARGIN",
        ),
        absent(
            subjects.TOKENIZER,
            "--skip-tokenizer-init --tokenizer-backend --tokenizer-path",
            "SGLANG_PATCH_TOKENIZER",
        ),
        absent(
            subjects.CONSTRAINT,
            "",
            "SGLANG_GRAMMAR_MAX_POLL_ITERATIONS SGLANG_GRAMMAR_POLL_INTERVAL",
        ),
        absent(
            subjects.GGUF,
            "",
            "SGLANG_USE_MODELSCOPE",
        ),
        absent(
            subjects.SAMPLING,
            "--mlx-enable-sampling --preferred-sampling-params",
        ),
        absent(
            subjects.ROUTER,
            "--enable-session-radix-cache --enable-streaming-session",
        ),
        absent(
            subjects.SLEEP,
            "--enable-memory-saver --sleep-on-idle",
            "SGLANG_MEMORY_SAVER_CUDA_GRAPH",
        ),
        absent(
            subjects.WEIGHT_UPDATES,
            "--checkpoint-engine-wait-weights-before-ready --enable-weights-cpu-backup "
            "--remote-instance-weight-loader-backend --remote-instance-weight-loader-seed-instance-ip "
            "--remote-instance-weight-loader-seed-instance-service-port "
            "--remote-instance-weight-loader-send-weights-group-ports "
            "--remote-instance-weight-loader-start-seed-via-transfer-engine --weight-cache-mode "
            "--weight-cache-socket --weight-cache-timeout --weight-version",
        ),
        absent(
            subjects.KV_TRANSFER,
            "--disaggregation-bootstrap-port --disaggregation-decode-allocation-policy "
            "--disaggregation-decode-enable-offload-kvcache --disaggregation-decode-enable-radix-cache "
            "--disaggregation-decode-extra-slots --disaggregation-decode-host-receive-threshold "
            "--disaggregation-decode-polling-interval --disaggregation-decode-retraction-backup "
            "--disaggregation-enable-kv-checksum --disaggregation-ib-device --disaggregation-mode "
            "--disaggregation-transfer-backend --enable-flexkv --enable-lmcache --enable-pd-role-switch "
            "--enable-pdmux --enable-unified-cache-external-linker --encoder-bootstrap-port --encoder-only "
            "--encoder-register-urls --encoder-transfer-backend --encoder-urls --flexkv-config-file "
            "--kv-events-config --lmcache-config-file --mooncake-ib-device --optimistic-prefill-attempts "
            "--pdmux-config-path --unified-cache-external-linker-backend --unified-cache-external-linker-config",
            "SGLANG_DISAGGREGATION_ALL_CP_RANKS_TRANSFER SGLANG_DISAGGREGATION_BOOTSTRAP_ENTRY_CLEANUP_INTERVAL "
            "SGLANG_DISAGGREGATION_BOOTSTRAP_TIMEOUT SGLANG_DISAGGREGATION_HEARTBEAT_INTERVAL "
            "SGLANG_DISAGGREGATION_HEARTBEAT_MAX_FAILURE SGLANG_DISAGGREGATION_NIXL_BACKEND "
            "SGLANG_DISAGGREGATION_QUEUE_SIZE SGLANG_DISAGGREGATION_THREAD_POOL_SIZE "
            "SGLANG_DISAGGREGATION_WAITING_TIMEOUT SGLANG_DISAGG_STAGING_BUFFER "
            "SGLANG_DISAGG_STAGING_POOL_SIZE_MB SGLANG_HICACHE_MOONCAKE_CONFIG_PATH "
            "SGLANG_HICACHE_MOONCAKE_REUSE_TE SGLANG_HICACHE_NIXL_BACKEND_STORAGE_DIR "
            "SGLANG_MOONCAKE_CUSTOM_MEM_POOL SGLANG_MOONCAKE_SEND_AUX_TCP SGLANG_NIXL_EP_BF16_DISPATCH "
            "SGLANG_NIXL_EP_NUM_MAX_DISPATCH_TOKENS_PER_RANK SGLANG_TEST_PD_DISAGG_BACKEND "
            "SGLANG_TEST_PD_DISAGG_DEVICES",
        ),
        absent(
            subjects.OFFLOAD,
            "--cpu-offload-gb --enable-hicache --enable-hierarchical-cache --enable-hisparse "
            "--enable-paged-experts --hicache-host-memory-fraction --hicache-host-memory-mode "
            "--hicache-io-backend --hicache-mem-layout --hicache-ratio --hicache-size --hicache-storage-backend "
            "--hicache-storage-backend-extra-config --hicache-storage-prefetch-policy "
            "--hicache-storage-prefetch-retry-max-attempts --hicache-storage-prefetch-retry-poll-interval "
            "--hicache-write-policy --hierarchical-sparse-attention-extra-config --hisparse-config --kt-cpuinfer "
            "--kt-max-deferred-experts-per-token --kt-method --kt-num-gpu-experts --kt-threadpool-count "
            "--kt-weight-path --offload-group-size --offload-mode --offload-num-in-group --offload-prefetch-step "
            "--paged-experts-num-resident --ple-offload-backend --ple-offload-dir --ple-offload-embedding",
            "SGLANG_HICACHE_DECODE_OFFLOAD_STRIDE SGLANG_HICACHE_FILE_BACKEND_STORAGE_DIR "
            "SGLANG_HICACHE_HF3FS_CONFIG_PATH",
        ),
        absent(
            subjects.OTHER_LAYERS,
            "--disable-hybrid-swa-memory --ds-channel-config-path --ds-heavy-channel-num --ds-heavy-channel-type "
            "--ds-heavy-token-num --ds-sparse-decode-threshold --enable-decoder-swa-bounded-replay "
            "--enable-double-sparsity --enable-encoder-swa-bounded-replay --enable-int8-mamba-checkpoint "
            "--enable-linear-replayssm --enable-linear-replayssm-spec --enable-mamba-cache-stochastic-rounding "
            "--enable-scattered-sconv --int8-mamba-ckpt-size --linear-attn-backend --linear-attn-decode-backend "
            "--linear-attn-prefill-backend --linear-attn-verify-backend --linear-replayssm-cache-len "
            "--mamba-backend --mamba-cache-philox-rounds --mamba-full-memory-ratio --mamba-max-states-per-path "
            "--mamba-radix-cache-strategy --mamba-scheduler-strategy --mamba-ssm-dtype --mamba-track-interval "
            "--max-mamba-cache-size --swa-full-tokens-ratio --swa-prefix-tails --uses-mamba-radix-cache",
            "SGLANG_MAMBA_CONV_DTYPE SGLANG_MAMBA_SSM_DTYPE",
        ),
        absent(
            subjects.NODES,
            "--attention-data-parallel-size --attn-dp-size --dist-init-addr --dwdp-size --elastic-ep-backend "
            "--elastic-ep-initial-size --elastic-ep-join-mode --elastic-ep-join-rank-offset "
            "--elastic-ep-scale-timeout --enable-elastic-expert-backup --gated-launch-port --load-balance-method "
            "--moe-data-parallel-size --moe-dp-size --nccl-init-addr --nccl-port --use-ray",
            "SGLANG_DATA_PARALLEL_BUDGET_INTERVAL SGLANG_DISTRIBUTED_INIT_METHOD_OVERRIDE SGLANG_TCP_STORE_PORT",
        ),
        absent(
            subjects.PIPELINE,
            "--cp-strategy --dcp-comm-backend --dcp-replicate-q-proj --deepep-config "
            "--deepep-dispatcher-output-dtype --deepep-mode --deepep-v2-mode --disable-attn-tp-gather "
            "--disable-shared-experts-fusion --enable-attn-tp-input-scattered --enable-cp-decode-attn-tp "
            "--enable-cp-tp-group-sharing --enable-dense-mlp-attn-tp --enable-dp-attention "
            "--enable-dp-attention-local-control-broadcast --enable-dp-lm-head --enable-eplb "
            "--enable-expert-distribution-metrics --enable-kv-cache-sharding --enable-layernorm-sp "
            "--enable-megamoe-for-layernorm-sp --enable-nsa-prefill-context-parallel "
            "--enable-prefill-context-parallel --enable-prefill-cp --enable-shared-experts-attn-tp "
            "--enable-single-batch-overlap --enable-tp-lm-head-all-to-all --enable-two-batch-overlap "
            "--enable-waterfill --enforce-shared-experts-fusion --ep-dispatch-algorithm "
            "--ep-num-redundant-experts --eplb-algorithm --eplb-min-rebalancing-utilization-threshold "
            "--eplb-rebalance-layers-per-chunk --eplb-rebalance-num-iterations --expert-balancedness-report-mode "
            "--expert-distribution-recorder-buffer-size --expert-distribution-recorder-mode "
            "--init-expert-location --moe-a2a-backend --moe-dense-tp-size --nsa-prefill-cp-mode "
            "--pp-async-batch-depth --pp-max-micro-batch-size --prefill-cp-mode --shared-experts-tp-size "
            "--tbo-token-distribution-threshold",
            "SGLANG_BLACKWELL_OVERLAP_SHARED_EXPERTS_OUTSIDE_SBO SGLANG_DEEPEP_BF16_DISPATCH "
            "SGLANG_DEEPEP_LL_COMBINE_SEND_NUM_SMS SGLANG_DEEPEP_NUM_MAX_DISPATCH_TOKENS_PER_RANK "
            "SGLANG_ENABLE_METRICS_DP_ATTENTION SGLANG_EPLB_HEATMAP_COLLECTION_INTERVAL "
            "SGLANG_EXPERT_DISTRIBUTION_RECORDER_DIR SGLANG_EXPERT_LOCATION_UPDATER_CANARY "
            "SGLANG_EXPERT_LOCATION_UPDATER_LOG_INPUT SGLANG_EXPERT_LOCATION_UPDATER_LOG_METRICS "
            "SGLANG_LOG_EXPERT_LOCATION_METADATA SGLANG_TBO_DEBUG",
        ),
        absent(
            subjects.MODEL_OVERRIDE,
            "--decrypted-config-file --json-model-override-args --model-config-parser --modelexpress-config",
            "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN",
        ),
        absent(
            subjects.QUANTIZATION,
            "--disable-flashinfer-cutlass-moe-fp4-allgather --enable-deepseek-v4-fp4-indexer "
            "--enable-quant-communications --enable-w4a4-mxfp4-megamoe --flashinfer-mxfp4-moe-precision "
            "--fp4-gemm-backend --modelopt-checkpoint-restore-path --modelopt-checkpoint-save-path "
            "--modelopt-export-path --modelopt-quant --quantization-param-path --quantize-and-serve "
            "--torchao-config",
            "SGLANG_CPU_QUANTIZATION SGLANG_FORCE_FP8_MARLIN SGLANG_FP8_IGNORED_LAYERS SGLANG_INT4_WEIGHT "
            "SGLANG_QUANT_ALLOW_DOWNCASTING",
        ),
        absent(
            subjects.KV_FORMATS,
            "--prefill-kv-cache-dequant-dtype",
        ),
        absent(
            subjects.CACHE_TUNING,
            "--disable-chunked-prefix-cache --enable-page-major-kv-layout --enable-unified-memory "
            "--hybrid-kvcache-ratio --radix-cache-backend --radix-eviction-policy-config",
            "SGLANG_CHUNKED_PREFIX_CACHE_THRESHOLD",
        ),
        absent(
            subjects.SCHEDULING,
            "--abort-on-priority-when-disabled --batch-notify-size --default-priority-value "
            "--disable-priority-preemption --enable-dynamic-chunking --enable-mixed-chunk "
            "--enable-prefill-delayer --min-free-slots-delay --num-continuous-decode-steps "
            "--num-reserved-decode-tokens --prefill-decode-interval --prefill-decode-interval-min-bs "
            "--prefill-delayer-max-delay-ms --prefill-delayer-max-delay-passes --prefill-delayer-queue-min-ratio "
            "--prefill-delayer-token-usage-low-watermark --prefill-max-requests --prefill-only-disable-kv-cache "
            "--prefill-round-robin-balance --priority-scheduling-preemption-threshold --retraction-policy "
            "--schedule-conservativeness --schedule-low-priority-values-first --scheduler-recv-interval",
            "SGLANG_DISABLE_CONSECUTIVE_PREFILL_OVERLAP SGLANG_DYNAMIC_CHUNKING_SMOOTH_FACTOR "
            "SGLANG_FLASHINFER_PREFILL_SPLIT_TILE_SIZE SGLANG_INIT_NEW_TOKEN_RATIO "
            "SGLANG_LOG_SCHEDULER_STATUS_INTERVAL SGLANG_LOG_SCHEDULER_STATUS_TARGET "
            "SGLANG_MIN_NEW_TOKEN_RATIO_FACTOR SGLANG_NCCL_ALL_GATHER_IN_OVERLAP_SCHEDULER_SYNC_BATCH "
            "SGLANG_NEW_TOKEN_RATIO_DECAY_STEPS SGLANG_OTLP_EXPORTER_SCHEDULE_DELAY_MILLIS "
            "SGLANG_PREFILL_DELAYER_MAX_DELAY_PASSES SGLANG_PREFILL_DELAYER_TOKEN_USAGE_LOW_WATERMARK "
            "SGLANG_RETRACT_DECODE_STEPS SGLANG_SCHEDULER_DECREASE_PREFILL_IDLE "
            "SGLANG_SCHEDULER_MAX_RECV_PER_POLL SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DECODE "
            "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_DEFAULT SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_NONE "
            "SGLANG_SCHEDULER_RECV_SKIPPER_WEIGHT_TARGET_VERIFY SGLANG_SCHEDULER_SKIP_ALL_GATHER "
            "SGLANG_SKIP_SOFTMAX_PREFILL_THRESHOLD_SCALE_FACTOR SGLANG_TEST_RETRACT SGLANG_TEST_RETRACT_INTERVAL "
            "SGLANG_TEST_RETRACT_NO_PREFILL_BS SGLANG_TEST_STUCK_SCHEDULER_INIT",
        ),
        absent(
            subjects.LIMITS,
            "--allow-auto-truncate --dist-timeout --grpc-response-timeout-secs",
            "SGLANG_ENCODER_GRPC_TIMEOUT_SECS SGLANG_ENCODER_RECV_TIMEOUT SGLANG_ENCODER_SEND_TIMEOUT "
            "SGLANG_REQUEST_STATE_WAIT_TIMEOUT SGLANG_REQ_RUNNING_TIMEOUT SGLANG_WARMUP_TIMEOUT",
        ),
        absent(
            subjects.COMPILATION,
            "--context-bucket --cuda-graph-backend-decode --cuda-graph-backend-prefill --cuda-graph-bs "
            "--cuda-graph-bs-decode --cuda-graph-bs-prefill --cuda-graph-config --cuda-graph-max-bs "
            "--cuda-graph-max-bs-decode --cuda-graph-max-bs-prefill --cuda-graph-max-seq-len-prefill "
            "--cuda-graph-prefill-max-context --debug-cuda-graph --disable-cuda-graph-padding "
            "--disable-decode-cuda-graph --disable-piecewise-cuda-graph --disable-prefill-cuda-graph "
            "--enable-cudagraph-gc --enable-piecewise-cuda-graph --enable-profile-cuda-graph "
            "--enable-torch-compile --enable-torch-compile-debug-mode --enforce-piecewise-cuda-graph "
            "--piecewise-cuda-graph-compiler --piecewise-cuda-graph-max-tokens --piecewise-cuda-graph-tokens "
            "--torch-compile-max-bs",
            "SGLANG_ENABLE_JIT_DEEPGEMM SGLANG_ENABLE_TORCH_COMPILE SGLANG_JIT_DEEPGEMM_FAST_WARMUP "
            "SGLANG_JIT_DEEPGEMM_PRECOMPILE",
        ),
        absent(
            subjects.KERNELS,
            "--attention-backend --bf16-gemm-backend --decode-attention-backend "
            "--disable-aiter-allreduce-fusion-in-decode --disable-aiter-allreduce-fusion-in-prefill "
            "--disable-custom-all-reduce --disable-flashinfer-autotune --dsa-decode-backend "
            "--dsa-paged-mqa-logits-backend --dsa-prefill-backend --dsa-topk-backend --dsa-triton-union "
            "--dsv4-attn-backend --dsv4-prefill-backend --enable-aiter-allreduce-fusion "
            "--enable-dsa-cache-layer-split --enable-dsa-fused-indexer --enable-flashinfer-allreduce-fusion "
            "--enable-fp32-lm-head --enable-fused-moe-sum-all-reduce --enable-fused-qk-norm-rope "
            "--enable-lean-attention --enable-linker-mla-dedup --enable-mscclpp --enable-nan-detection "
            "--enable-nccl-nvls --enable-p2p-check --enable-precise-embedding-interpolation --enable-symm-mem "
            "--enable-tf32-matmul --enable-torch-symm-mem --enforce-disable-flashinfer-allreduce-fusion "
            "--flashinfer-a2a-dispatch-type --flashinfer-allreduce-fusion-backend --flashinfer-autotune-skip-ops "
            "--flashinfer-mla-disable-ragged --fp8-gemm-backend --fuseep-mode --moe-runner-backend "
            "--nsa-decode-backend --nsa-prefill-backend --pre-warm-nccl --prefill-attention-backend "
            "--sampling-backend --triton-attention-num-kv-splits --triton-attention-reduce-in-fp32 "
            "--triton-attention-split-tile-size",
            "SGLANG_DG_USE_NVRTC SGLANG_ENABLE_OVERLAP_PLAN_STREAM SGLANG_ENABLE_TORCH_INFERENCE_MODE "
            "SGLANG_ENABLE_TP_MEMORY_INBALANCE_CHECK SGLANG_FLASHINFER_DECODE_SPLIT_TILE_SIZE "
            "SGLANG_FLASHINFER_WORKSPACE_SIZE SGLANG_IN_DEEPGEMM_PRECOMPILE_STAGE SGLANG_IS_FLASHINFER_AVAILABLE "
            "SGLANG_MOE_NVFP4_DISPATCH SGLANG_MOE_PADDING SGLANG_NPU_FORWARD_NATIVE_GEMMA_RMS_NORM "
            "SGLANG_NPU_USE_MLAPO SGLANG_NPU_USE_MULTI_STREAM SGLANG_NVFP4_CKPT_FP8_GEMM_IN_ATTN "
            "SGLANG_NVFP4_CKPT_FP8_NEXTN_MOE SGLANG_ROCM_FUSED_DECODE_MLA SGLANG_SKIP_SGL_KERNEL_VERSION_CHECK "
            "SGLANG_STAGING_USE_TORCH SGLANG_SYMM_MEM_PREALLOC_GB_SIZE SGLANG_TRITON_DECODE_ATTN_STATIC_KV_SPLITS "
            "SGLANG_TRITON_DECODE_SPLIT_TILE_SIZE SGLANG_USE_1STAGE_ALLREDUCE SGLANG_USE_AG_AFTER_QLORA "
            "SGLANG_USE_AITER SGLANG_USE_AITER_FP8_PER_TOKEN SGLANG_USE_CUDA_IPC_TRANSPORT "
            "SGLANG_USE_CUSTOM_TRITON_KERNEL_CACHE SGLANG_USE_DEEPGEMM_BMM SGLANG_USE_IPC_POOL_HANDLE_CACHE "
            "SGLANG_USE_MESSAGE_QUEUE_BROADCASTER SGLANG_USE_MLX",
        ),
        absent(
            subjects.PLACEMENT,
            "--gpu-id-step --numa-node",
            "SGLANG_AUTO_NUMA_BIND SGLANG_ENABLE_METRICS_DEVICE_TIMER SGLANG_NUMA_BIND_V2 "
            "SGLANG_ONE_VISIBLE_DEVICE_PER_PROCESS SGLANG_SET_CPU_AFFINITY",
        ),
        absent(
            subjects.LOADING,
            "--delete-ckpt-after-loading --model-loader-extra-config --startup-weight-load-mode "
            "--weight-loader-disable-mmap --weight-loader-drop-cache-after-load "
            "--weight-loader-prefetch-checkpoints --weight-loader-prefetch-num-threads",
            "SGLANG_SORT_WEIGHT_FILES",
        ),
        absent(
            subjects.LOGGING,
            "--crash-dump-folder --decode-log-interval --enable-request-time-stats-logging --log-requests-format "
            "--log-requests-level --log-requests-target --show-time-cost --uvicorn-access-log-exclude-prefixes",
            "SGLANG_LOGGING_CONFIG_PATH SGLANG_LOG_FORWARD_ITERS SGLANG_LOG_GC SGLANG_LOG_MS "
            "SGLANG_LOG_REQUEST_EXCEEDED_MS SGLANG_LOG_REQUEST_HEADERS SGLANG_RETURN_ORIGINAL_LOGPROB",
        ),
        absent(
            subjects.METRICS,
            "--bucket-e2e-request-latency --bucket-inter-token-latency --bucket-time-to-first-token "
            "--collect-tokens-histogram --enable-forward-pass-metrics --enable-layerwise-nvtx-marker "
            "--enable-metrics-for-all-schedulers --enable-mfu-metrics --export-metrics-to-file "
            "--export-metrics-to-file-dir --extra-metric-labels --forward-pass-metrics-ipc-name "
            "--forward-pass-metrics-worker-id --generation-tokens-buckets --load-publish-endpoint "
            "--load-snapshot-publish-interval --otlp-service-name --prefill-delayer-forward-passes-buckets "
            "--prefill-delayer-wait-seconds-buckets --prompt-tokens-buckets "
            "--tokenizer-metrics-allowed-custom-labels --tokenizer-metrics-custom-labels-header --trace-modules",
            "SGLANG_OTLP_EXPORTER_MAX_EXPORT_BATCH_SIZE SGLANG_TEST_REQUEST_TIME_STATS",
        ),
        absent(
            subjects.DEBUGGING,
            "--debug-tensor-dump-inject --debug-tensor-dump-input-file --debug-tensor-dump-layers "
            "--debug-tensor-dump-output-folder --kv-canary --kv-canary-real-data --kv-canary-sweep-interval "
            "--model-checksum --msprobe-dump-config",
            "SGLANG_DEBUG_MEMORY_POOL SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY "
            "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_IDLE SGLANG_PROFILE_RECORD_SHAPES SGLANG_PROFILE_V2 "
            "SGLANG_PROFILE_WITH_STACK SGLANG_SIMULATE_ACC_LEN SGLANG_SIMULATE_ACC_METHOD "
            "SGLANG_TEST_CRASH_AFTER_STREAM_OUTPUTS SGLANG_TEST_MAX_RETRY SGLANG_TEST_STUCK_DETOKENIZER "
            "SGLANG_TEST_STUCK_DP_CONTROLLER SGLANG_TEST_STUCK_TOKENIZER SGLANG_TORCH_PROFILER_DIR",
        ),
        absent(
            subjects.ROUTES,
            "--enable-response-store --file-storage-path --grpc-http-sidecar-port "
            "--http2-initial-connection-window-size --http2-max-concurrent-streams --incremental-streaming-output "
            "--return-input-ids --return-output-ids --stream-output --stream-response-default-include-usage",
            "SGLANG_ENABLE_HEALTH_ENDPOINT_GENERATION SGLANG_SYNC_TOKEN_IDS_ACROSS_TP",
        ),
        absent(
            subjects.LISTENING,
            "--enable-http-worker-reuseport --enable-http2 --engine-info-bootstrap-port --grpc-mode --grpc-port "
            "--grpc-worker-threads --sidecar --sidecar-args --smg-grpc-mode --smg-http-sidecar-port",
            "SGLANG_BACKUP_PORT_BASE",
        ),
        absent(
            subjects.PROCESSES,
            "--c128-page-size --disable-tokenizer-batch-decode --dynamic-batch-tokenizer-batch-size "
            "--dynamic-batch-tokenizer-batch-timeout --enable-dynamic-batch-tokenizer "
            "--enable-tokenizer-batch-encode --gc-threshold --gc-warning-threshold-secs --max-ep-size --warmups",
            "SGLANG_DETECT_SLOW_RANK SGLANG_DG_CACHE_DIR SGLANG_EMPTY_CACHE_INTERVAL SGLANG_IS_FIRST_RANK_ON_NODE "
            "SGLANG_NATIVE_MOVE_KV_CACHE",
        ),
        absent(
            subjects.OTHER,
            "--boundary-reduction --enable-adaptive-dispatch-to-encoder --qsa-indexer-dtype --sm-group-num",
            "SGLANG_CUDA_COREDUMP SGLANG_CUDA_COREDUMP_DIR SGLANG_DISABLED_MODEL_ARCHS "
            "SGLANG_EMBEDDINGS_SPARSE_HEAD SGLANG_ENABLE_COLOCATED_BATCH_GEN "
            "SGLANG_ENABLE_DETERMINISTIC_INFERENCE SGLANG_ENCODER_DISPATCH_MIN_ITEMS "
            "SGLANG_EXTERNAL_MODEL_PACKAGE SGLANG_FORCE_SHUTDOWN SGLANG_IS_IN_CI SGLANG_IS_IN_CI_AMD "
            "SGLANG_NPU_DISABLE_ACL_FORMAT_WEIGHT SGLANG_NPU_FORWARD_NATIVE_GELUTANH SGLANG_RECORD_STEP_TIME "
            "SGLANG_RESIZE_RESAMPLE SGLANG_ROCM_DISABLE_LINEARQUANT "
            "SGLANG_SKIP_SOFTMAX_DECODE_THRESHOLD_SCALE_FACTOR",
        ),
    ),
    prefix="SGLANG_",
)  # fmt: skip

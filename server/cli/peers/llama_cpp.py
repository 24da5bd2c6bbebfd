"""The flags and environment variables of llama.cpp's `llama-server`, of autumn 2026, and flags of older versions."""

from __future__ import annotations

from typing import Final

from server.cli.peers import common, forms, subjects
from server.cli.peers.answers import Peer, absent, always, near, understood

LLAMA_CPP: Final = Peer(
    "llama.cpp",
    (
        understood("model", "-m --model", "LLAMA_ARG_MODEL"),
        understood("model", "-hf -hfr --hf-repo", "LLAMA_ARG_HF_REPO"),
        understood("served_model_name", "-a --alias", "LLAMA_ARG_ALIAS"),
        understood("host", "--host", "LLAMA_ARG_HOST"),
        understood("port", "--port", "LLAMA_ARG_PORT"),
        understood("chat_template", "--chat-template", "LLAMA_ARG_CHAT_TEMPLATE"),
        understood("chat_template", "--chat-template-file", "LLAMA_ARG_CHAT_TEMPLATE_FILE"),
        understood("max_model_len", "-c --ctx-size", "LLAMA_ARG_CTX_SIZE", form=forms.zero_is_default),
        understood("max_num_seqs", "-np --parallel", "LLAMA_ARG_N_PARALLEL", form=forms.zero_is_default),
        understood("max_draft_tokens", "--draft --draft-max --draft-n --spec-draft-n-max",
                   "LLAMA_ARG_DRAFT_MAX LLAMA_ARG_SPEC_DRAFT_N_MAX"),
        understood("cpu_threads", "-t --threads", "LLAMA_ARG_THREADS", form=forms.zero_is_default),
        understood("device", "-ngl --gpu-layers --n-gpu-layers", "LLAMA_ARG_N_GPU_LAYERS", form=forms.gpu_layers),
        understood("enable_prefix_caching", "--cache-prompt", "LLAMA_ARG_CACHE_PROMPT", form=forms.on,
                   takes="nothing"),
        understood("api_key", "--api-key", "LLAMA_API_KEY"),
        understood("api_key_file", "--api-key-file", "LLAMA_ARG_API_KEY_FILE"),
        understood("cors_allow_origin", "--cors-origins", "LLAMA_ARG_CORS_ORIGINS"),
        understood("log_format", "--log-jsonl", "LLAMA_ARG_LOG_JSONL", form=forms.json_format, takes="nothing"),
        understood("log_level", "-v --verbose --log-verbose", form=forms.debug_level, takes="nothing"),
        always("requests are batched as they come", "-cb --cont-batching", "LLAMA_ARG_CONT_BATCHING"),
        always("attention is flash attention", "-fa --flash-attn", "LLAMA_ARG_FLASH_ATTN", only="on auto 1 true",
               takes="optional"),
        always("chat templates are rendered by Jinja", "--jinja", "LLAMA_ARG_JINJA"),
        always("all sequences share the KV cache", "-kvu --kv-unified", "LLAMA_ARG_KV_UNIFIED"),
        always("the KV cache is where the model is", "-kvo --kv-offload", "LLAMA_ARG_KV_OFFLOAD"),
        always(common.METRICS, "--metrics", "LLAMA_ARG_ENDPOINT_METRICS"),
        always("kernels are compiled and the largest step is measured before requests are served",
               "--warmup", either=True),
        always("a context is never shifted", "--no-context-shift", "LLAMA_ARG_NO_CONTEXT_SHIFT"),
        always("there is no such route", "--no-slots"),
        always("weights are read into memory", "--mmap --no-mmap --mlock --load-mode -lm --repack --no-repack -nr",
               "LLAMA_ARG_LOAD_MODE LLAMA_ARG_MMAP LLAMA_ARG_NO_MMAP LLAMA_ARG_MLOCK LLAMA_ARG_REPACK",
               takes="nothing", either=True),
        always("GET / is a page", "--ui --webui", "LLAMA_ARG_UI"),
        near("the field continue_final_message of a request continues a message of the assistant",
             "--prefill-assistant", "LLAMA_ARG_PREFILL_ASSISTANT", takes="nothing"),
        always("lines of the log have time and level", "--log-prefix --log-timestamps",
               "LLAMA_ARG_LOG_PREFIX LLAMA_ARG_LOG_TIMESTAMPS"),
        always("lines of the log have no colours", "--log-colors", "LLAMA_ARG_LOG_COLORS", only="off auto",
               takes="value"),
        always("there is no performance log; GET /metrics has the times", "--perf", "LLAMA_ARG_PERF", either=True),
        always("settings are fitted to the memory where they are not given", "-fit --fit", "LLAMA_ARG_FIT",
               only="on true 1", takes="value"),
        always("the first GPU is used", "-mg --main-gpu", "LLAMA_ARG_MAIN_GPU", only="0", takes="value"),
        understood("device", "-dev --device", "LLAMA_ARG_DEVICE", form=forms.no_device),
        near("--max-num-batched-tokens limits the tokens of a step", "-b --batch-size -ub --ubatch-size",
             "LLAMA_ARG_BATCH LLAMA_ARG_UBATCH"),
        near("--kv-cache-dtype is auto or fp8, for keys and values", "-ctk --cache-type-k -ctv --cache-type-v",
             "LLAMA_ARG_CACHE_TYPE_K LLAMA_ARG_CACHE_TYPE_V"),
        near("--tensor-parallel N divides the model evenly among N GPUs", "-sm --split-mode -ts --tensor-split",
             "LLAMA_ARG_SPLIT_MODE LLAMA_ARG_TENSOR_SPLIT"),
        near("--max-model-len limits a sequence", "--kv-unified-per-slot", "LLAMA_ARG_KV_UNIFIED_PER_SLOT"),
        near("--cpu-threads is for prompts and answers", "-tb --threads-batch"),
        near("--frontends sets the number of processes for HTTP", "--threads-http", "LLAMA_ARG_THREADS_HTTP"),
        near("--header-timeout and --keep-alive-timeout limit connections", "-to --timeout", "LLAMA_ARG_TIMEOUT"),
        near("--log-level is debug, info, warning or error", "-lv --verbosity --log-verbosity",
             "LLAMA_ARG_LOG_VERBOSITY"),
        near("--enable-prefix-caching keeps computed prefixes, in the KV cache", "-cram --cache-ram --cache-reuse",
             "LLAMA_ARG_CACHE_RAM LLAMA_ARG_CACHE_REUSE"),
        near(common.GPU_MEMORY, "-fitt --fit-target -fitc --fit-ctx", "LLAMA_ARG_FIT_TARGET LLAMA_ARG_FIT_CTX"),
        near(common.SEED, "-s --seed"),
        near(common.DRAFTS, "--spec-type --spec-default", "LLAMA_ARG_SPEC_TYPE"),
        near(common.HUB_TOKEN, "-hft --hf-token"),
        near(common.OFFLINE, "--offline", "LLAMA_ARG_OFFLINE", takes="nothing"),
        near("`tessera doctor` lists the GPUs", "--list-devices", takes="nothing"),
        near("`tessera completion bash` prints the script", "--completion-bash", takes="nothing"),
        near("the field max_tokens of a request limits its answer", "-n --predict --n-predict",
             "LLAMA_ARG_N_PREDICT"),
        # The rest is not in Tessera.
        absent(
            subjects.GGUF_ADAPTERS,
            "--lora --lora-init-without-apply --lora-scaled",
        ),
        absent(
            subjects.SPECULATION,
            "--cache-type-k-draft --cache-type-v-draft --cpu-mask-batch-draft --cpu-mask-draft --cpu-moe-draft "
            "--cpu-range-batch-draft --cpu-range-draft --cpu-strict-batch-draft --cpu-strict-draft --device-draft "
            "--draft-min --draft-n-min --draft-p-min --draft-p-split "
            "--gpu-layers-draft --hf-repo-draft --lookup-cache-dynamic --lookup-cache-static --model-draft "
            "--n-cpu-moe-draft --n-gpu-layers-draft --override-tensor-draft --poll-batch-draft --poll-draft "
            "--prio-batch-draft --prio-draft --spec-draft-backend-sampling --spec-draft-cpu-mask "
            "--spec-draft-cpu-mask-batch --spec-draft-cpu-moe --spec-draft-cpu-range --spec-draft-cpu-range-batch "
            "--spec-draft-cpu-strict --spec-draft-cpu-strict-batch --spec-draft-device --spec-draft-hf "
            "--spec-draft-model --spec-draft-n-cpu-moe --spec-draft-n-min --spec-draft-ncmoe "
            "--spec-draft-ngl --spec-draft-override-tensor --spec-draft-p-min --spec-draft-p-split "
            "--spec-draft-poll --spec-draft-poll-batch --spec-draft-prio --spec-draft-prio-batch "
            "--spec-draft-sampling --spec-draft-threads --spec-draft-threads-batch --spec-draft-type-k "
            "--spec-draft-type-v --spec-ngram-map-k-min-hits --spec-ngram-map-k-size-m --spec-ngram-map-k-size-n "
            "--spec-ngram-map-k4v-min-hits --spec-ngram-map-k4v-size-m --spec-ngram-map-k4v-size-n "
            "--spec-ngram-min-hits --spec-ngram-mod-n-match --spec-ngram-mod-n-max --spec-ngram-mod-n-min "
            "--spec-ngram-simple-min-hits --spec-ngram-simple-size-m --spec-ngram-simple-size-n "
            "--spec-ngram-size-m --spec-ngram-size-n --spec-synth-len --spec-synth-rates "
            "--threads-batch-draft --threads-draft -Cbd -Cd -Crbd -Crd -cmoed -ctkd -ctvd -devd -hfd -hfrd -lcd "
            "-lcs -md -ncmoed -ngld -otd -tbd -td",
            "LLAMA_ARG_DRAFT_MIN LLAMA_ARG_N_GPU_LAYERS_DRAFT "
            "LLAMA_ARG_SPEC_DRAFT_BACKEND_SAMPLING LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_K "
            "LLAMA_ARG_SPEC_DRAFT_CACHE_TYPE_V LLAMA_ARG_SPEC_DRAFT_CPU_MOE LLAMA_ARG_SPEC_DRAFT_HF_REPO "
            "LLAMA_ARG_SPEC_DRAFT_MODEL LLAMA_ARG_SPEC_DRAFT_N_CPU_MOE "
            "LLAMA_ARG_SPEC_DRAFT_N_MIN LLAMA_ARG_SPEC_DRAFT_P_MIN LLAMA_ARG_SPEC_DRAFT_P_SPLIT "
            "LLAMA_ARG_SPEC_SYNTH_LEN LLAMA_ARG_SPEC_SYNTH_RATES",
        ),
        absent(
            subjects.POOLING,
            "--embd-gemma-default --embd-normalize --embedding --embeddings --pooling --rerank --reranking",
            "LLAMA_ARG_EMBEDDINGS LLAMA_ARG_POOLING LLAMA_ARG_RERANKING",
        ),
        absent(
            subjects.TLS,
            "--ssl-cert-file --ssl-key-file",
            "LLAMA_ARG_SSL_CERT_FILE LLAMA_ARG_SSL_KEY_FILE",
        ),
        absent(
            subjects.PATH_PREFIX,
            "--api-prefix",
            "LLAMA_ARG_API_PREFIX",
        ),
        absent(
            subjects.CORS,
            "--cors-credentials --cors-headers --cors-methods",
            "LLAMA_ARG_CORS_CREDENTIALS LLAMA_ARG_CORS_HEADERS LLAMA_ARG_CORS_METHODS",
        ),
        absent(
            subjects.SERVER_TOOLS,
            "--agent --mcp-servers-config --mcp-servers-json --tools --tools-runtime --ui-mcp-proxy "
            "--webui-mcp-proxy -ag -no-ag",
            "LLAMA_ARG_AGENT LLAMA_ARG_MCP_SERVERS_CONFIG LLAMA_ARG_MCP_SERVERS_JSON LLAMA_ARG_TOOLS "
            "LLAMA_ARG_TOOLS_RUNTIME LLAMA_ARG_UI_MCP_PROXY",
        ),
        absent(
            subjects.REASONING,
            "--reasoning --reasoning-budget --reasoning-budget-message --reasoning-effort --reasoning-format "
            "--reasoning-preserve -rea",
            "LLAMA_ARG_REASONING LLAMA_ARG_REASONING_EFFORT LLAMA_ARG_REASONING_PRESERVE LLAMA_ARG_THINK "
            "LLAMA_ARG_THINK_BUDGET LLAMA_ARG_THINK_BUDGET_MESSAGE",
        ),
        absent(
            subjects.TEMPLATE_DEFAULTS,
            "--chat-template-kwargs",
            "LLAMA_ARG_CHAT_TEMPLATE_KWARGS",
        ),
        absent(
            subjects.TEMPLATES,
            "--skip-chat-parsing --special --spm-infill --system-prompt-file -sp -spf",
            "LLAMA_ARG_SKIP_CHAT_PARSING",
        ),
        absent(
            subjects.MEDIA,
            "--image-max-tokens --image-min-tokens --media-path --mmproj --mmproj-auto --mmproj-device "
            "--mmproj-offload --mmproj-url --mtmd-batch-max-tokens --video-ffmpeg-dir --video-fps "
            "--video-timestamp-interval --vision-gemma-12b-default --vision-gemma-4b-default -mm -mmdev -mmu",
            "LLAMA_ARG_IMAGE_MAX_TOKENS LLAMA_ARG_IMAGE_MIN_TOKENS LLAMA_ARG_MMPROJ LLAMA_ARG_MMPROJ_AUTO "
            "LLAMA_ARG_MMPROJ_OFFLOAD LLAMA_ARG_MMPROJ_URL LLAMA_ARG_MTMD_BATCH_MAX_TOKENS "
            "LLAMA_ARG_VIDEO_FFMPEG_DIR LLAMA_ARG_VIDEO_FPS LLAMA_ARG_VIDEO_TIMESTAMP_INTERVAL "
            "MTMD_BACKEND_DEVICE",
        ),
        absent(
            subjects.ROPE,
            "--rope-freq-base --rope-freq-scale --rope-scale --rope-scaling --yarn-attn-factor --yarn-beta-fast "
            "--yarn-beta-slow --yarn-ext-factor --yarn-orig-ctx",
            "LLAMA_ARG_ROPE_FREQ_BASE LLAMA_ARG_ROPE_FREQ_SCALE LLAMA_ARG_ROPE_SCALE LLAMA_ARG_ROPE_SCALING_TYPE "
            "LLAMA_ARG_YARN_ATTN_FACTOR LLAMA_ARG_YARN_BETA_FAST LLAMA_ARG_YARN_BETA_SLOW "
            "LLAMA_ARG_YARN_EXT_FACTOR LLAMA_ARG_YARN_ORIG_CTX",
        ),
        absent(
            subjects.TOKENIZER,
            "--escape -e",
        ),
        absent(
            subjects.MODEL_SHORTCUTS,
            "--fim-qwen-1.5b-default --fim-qwen-14b-spec --fim-qwen-30b-default --fim-qwen-3b-default "
            "--fim-qwen-7b-default --fim-qwen-7b-spec --gpt-oss-120b-default --gpt-oss-20b-default",
        ),
        absent(
            subjects.CONSTRAINT,
            "--grammar --grammar-file --json-schema --json-schema-file -j -jf",
        ),
        absent(
            subjects.GGUF,
            "--docker-repo --hf-file --model-url -dr -hff -mu",
            "LLAMA_ARG_DOCKER_REPO LLAMA_ARG_HF_FILE LLAMA_ARG_MODEL_URL",
        ),
        absent(
            subjects.SAMPLING,
            "--adaptive-decay --adaptive-target --cfg-scale --control-vector --control-vector-layer-range "
            "--control-vector-scaled --dry-allowed-length --dry-base --dry-multiplier --dry-penalty-last-n "
            "--dry-sequence-breaker --dynatemp-exp --dynatemp-range --frequency-penalty --ignore-eos --logit-bias "
            "--min-p --mirostat --mirostat-ent --mirostat-lr --presence-penalty --repeat-last-n --repeat-penalty "
            "--reverse-prompt --sampler-seq --samplers --sampling-seq --temp --temperature --tfs --top-k "
            "--top-n-sigma --top-nsigma --top-p --typical --typical-p --xtc-probability --xtc-threshold -l -r",
            "LLAMA_ARG_FREQUENCY_PENALTY LLAMA_ARG_MIN_P LLAMA_ARG_PRESENCE_PENALTY LLAMA_ARG_REPEAT_PENALTY "
            "LLAMA_ARG_TEMPERATURE LLAMA_ARG_TOP_K LLAMA_ARG_TOP_P",
        ),
        absent(
            subjects.ROUTER,
            "--cache-list --models-autoload --models-dir --models-max --models-preset --tags -cl",
            "LLAMA_ARG_MODELS_AUTOLOAD LLAMA_ARG_MODELS_DIR LLAMA_ARG_MODELS_MAX LLAMA_ARG_MODELS_PRESET "
            "LLAMA_ARG_TAGS",
        ),
        absent(
            subjects.SLEEP,
            "--sleep-idle-seconds",
        ),
        absent(
            subjects.OFFLOAD,
            "--cpu-moe --lazy-mode --moe-cache-mib --n-cpu-ffn --n-cpu-moe --op-offload -cmoe -lzm -ncffn -ncmoe",
            "LLAMA_ARG_CPU_MOE LLAMA_ARG_LAZY_MODE LLAMA_ARG_MOE_CACHE_MIB LLAMA_ARG_N_CPU_FFN "
            "LLAMA_ARG_N_CPU_MOE",
        ),
        absent(
            subjects.OTHER_LAYERS,
            "--swa-checkpoints --swa-full",
            "LLAMA_ARG_SWA_FULL",
        ),
        absent(
            subjects.NODES,
            "--rpc",
            "LLAMA_ARG_RPC",
        ),
        absent(
            subjects.MODEL_OVERRIDE,
            "--grp-attn-n --grp-attn-w --override-kv --override-tensor -gan -gaw",
            "LLAMA_ARG_OVERRIDE_TENSOR",
        ),
        absent(
            subjects.KV_FORMATS,
            "--memory-f32",
        ),
        absent(
            subjects.CACHE_TUNING,
            "--cache-idle-slots --checkpoint-min-step --context-shift --ctx-checkpoints --defrag-thold --keep "
            "--slot-prompt-similarity --slot-save-path --slots --slots-endpoint-disable -cms -ctxcp -dt -no-kvu "
            "-sps",
            "LLAMA_ARG_CACHE_IDLE_SLOTS LLAMA_ARG_CHECKPOINT_MIN_SPACING_NT LLAMA_ARG_CONTEXT_SHIFT "
            "LLAMA_ARG_CTX_CHECKPOINTS LLAMA_ARG_DEFRAG_THOLD LLAMA_ARG_ENDPOINT_SLOTS",
        ),
        absent(
            subjects.SCHEDULING,
            "-nocb",
        ),
        absent(
            subjects.KERNELS,
            "--backend-sampling -bs -nkvo",
            "LLAMA_ARG_BACKEND_SAMPLING",
        ),
        absent(
            subjects.PLACEMENT,
            "--cpu-mask --cpu-mask-batch --cpu-range --cpu-range-batch --cpu-strict --cpu-strict-batch "
            "--numa --poll --poll-batch --prio --prio-batch -C -Cb -Cr -Crb -ot",
            "LLAMA_ARG_NO_HOST LLAMA_ARG_NUMA",
        ),
        absent(
            subjects.LOADING,
            "--check-tensors --direct-io -dio -ndio",
        ),
        absent(
            subjects.LOGGING,
            "--color --log-disable --log-file --log-prompts-dir -co",
            "LLAMA_ARG_LOG_FILE",
        ),
        absent(
            subjects.PAGE,
            "--path --ui-config --ui-config-file --webui-config --webui-config-file",
            "LLAMA_ARG_NO_WEBUI LLAMA_ARG_STATIC_PATH LLAMA_ARG_UI_CONFIG LLAMA_ARG_UI_CONFIG_FILE",
        ),
        absent(
            subjects.ROUTES,
            "--props --sse-ping-interval",
            "LLAMA_ARG_ENDPOINT_PROPS LLAMA_ARG_SSE_PING_INTERVAL",
        ),
        absent(
            subjects.LISTENING,
            "--reuse-port",
            "LLAMA_ARG_REUSE_PORT",
        ),
        absent(
            subjects.COMMAND_LINE,
            "--binary-file --file --prompt -bf -f -ins -p",
        ),
    ),
    prefix="LLAMA_ARG_",
    variables_are_flags=True,
)  # fmt: skip

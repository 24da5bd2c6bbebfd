"""Flags of other servers on a command line."""

import pytest

from server.cli.peers.reading import Given, PeerNameError, Reading
from server.cli.peers.words import take_out

OWN = {"--port", "--dtype", "--max-model-len", "--overlap", "--no-overlap", "-h"}


def texts(words):
    left, reading = take_out(words.split(), OWN)
    return left, {name: given.text for name, given in reading.given.items()}


@pytest.mark.parametrize(
    ("words", "left", "given"),
    [
        ("-m org/name -c 4096 --port 1", ["--port", "1"], {"model": "org/name", "max_model_len": "4096"}),
        ("-hf org/name -ngl 99", [], {"model": "org/name"}),
        ("-ngl 0", [], {"device": "cpu"}),
        ("--tp 2 -dp=4", [], {"tensor_parallel": "2", "data_parallel": "4"}),
        ("--model-id a --num-shard 2 --max-total-tokens 9", [],
         {"model": "a", "tensor_parallel": "2", "max_model_len": "9"}),
        ("--model-path a --max-total-tokens 9", [], {"model": "a", "kv_cache_tokens": "9"}),
        ("--enforce-eager org/name", ["org/name"], {"cuda_graphs": "false"}),
        ("--no-enforce-eager", [], {"cuda_graphs": "true"}),
        ("--disable-radix-cache --disable-overlap-schedule", [],
         {"enable_prefix_caching": "false", "overlap": "false"}),
        ("--no-cache-prompt", [], {"enable_prefix_caching": "false"}),
        ("--enable-auto-tool-choice org/name", ["org/name"], {}),
        ("-fa org/name", ["org/name"], {}),
        ("-fa on org/name", ["org/name"], {}),
        ("--kv-cache-memory-bytes 2G", [], {"kv_cache_gib": "2.0"}),
        ("-c 0 -np -1 -t -1", [], {}),
        ("--model-impl transformers", [], {"model_backend": "transformers"}),
        ("--model-impl vllm", [], {"model_backend": "vllm"}),
        ("-c 8192 -np 4 -kvu", [], {"max_model_len": "8192", "max_num_seqs": "4"}),
        ("--cuda-memory-fraction 0.5", [], {"gpu_memory_utilization": "0.5"}),
        ("--device-memory-utilization 0.9", [], {"gpu_memory_utilization": "0.9"}),
        ("--pipeline-parallel-size 1 --nnodes 1", [], {}),
        ("--max_model_len=5 --Overlap", ["--max-model-len=5", "--Overlap"], {}),
        ("--port 1 -- --tp 2", ["--port", "1", "--", "--tp", "2"], {}),
        ("--port -1 - x", ["--port", "-1", "-", "x"], {}),
        ("--enable-lora=false", [], {}),
        ("--no-trust-remote-code", [], {}),
    ],
)  # fmt: skip
def test_flags_with_the_same_meaning_are_settings_and_the_unknown_commands_stay(words, left, given):
    assert texts(words) == (left, given)


def test_origins_in_lists_in_json_are_separated_by_commas():
    _, reading = take_out(["--allowed-origins", '["https://a.b", "https://c.d"]'], OWN)

    assert reading.given["cors_allow_origin"].text == "https://a.b,https://c.d"


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (
            "--tokenizer x",
            "--tokenizer (vLLM): Tessera has no other tokenizer than the checkpoint's",
        ),
        ("--ssl-keyfile x", "Tessera has no TLS; put a proxy in front"),
        ("--root-path /x", "--root-path (vLLM): Tessera has no prefix of its routes"),
        ("--speculative-config {}", "--max-draft-tokens"),
        ("--mem-fraction-static 0.9", "--gpu-memory-utilization is "),
        ("--fit-target 1024", "--gpu-memory-utilization is "),
        ("--max-input-tokens 5", "--max-model-len limits prompt and output together"),
        ("-ngl 20", "-ngl 20: Tessera computes all layers on one device"),
        ("--flash-attn off", "--flash-attn off: Tessera has no such choice"),
        ("--tp", "--tp needs a value"),
        ("-c --jinja", "-c needs a value"),
        ("--pp 2", "--pp 2: Tessera has no such choice"),
        ("--tokenizer-mode slow", "without effect are only auto, hf, fast"),
        ("-cc.mode=3", "-cc.mode (vLLM): Tessera has no setting of compilation"),
        ("-O.level 3", "-O.level (vLLM): --cuda-graphs and --overlap are switches"),
        ("--kv-cache-memory-bytes " + "9" * 400, "it must be a number of bytes"),
        ("-ngl " + "9" * 5000, "Tessera computes all layers on one device"),
        ("--no-enable-chunked-prefill", "this cannot be switched off"),
        ("--max-total-tokens 5", "several meanings, --max-model-len in Text Generation Inference"),
        (
            "-c 1 --context-length 2",
            "-c and --context-length both set --max-model-len, to '1' and '2'",
        ),
        ("--kv-cache-memory-bytes x", "--kv-cache-memory-bytes x: it must be a number of bytes"),
        ("--enforce-eager=maybe", "--enforce-eager maybe: it must be true or false"),
        ("--allowed-origins [", "it is not valid JSON"),
    ],
)
def test_other_flags_are_refused_with_what_to_do(words, said):
    with pytest.raises(PeerNameError) as refusal:
        take_out(words.split(), OWN)
    assert said in str(refusal.value)


def test_a_value_that_is_secret_is_in_no_message():
    reading = Reading()
    reading.add("api_key", Given("hunter2", "API_KEY"))
    with pytest.raises(PeerNameError) as refusal:
        reading.add("api_key", Given("hunter3", "VLLM_API_KEY"))
    assert "hunter" not in str(refusal.value)
    assert "API_KEY and VLLM_API_KEY both set --api-key" in str(refusal.value)


def test_there_is_one_note_for_each_flag():
    _, reading = take_out(["--tp", "2", "--jinja", "-c", "0"], OWN)

    assert reading.notes == [
        "--tp is --tensor-parallel 2",
        "--jinja has no effect: chat templates are rendered by Jinja",
        "-c 0 has no effect: 0 and -1 stand for the default",
    ]

"""The parameters of requests in the APIs of TGI, OpenAI and vLLM, with a value that asks for something.

`docs.parameter_table` sends each to the service and reports what happens. Sources: TGI 3.3.6 (router/src/lib.rs), the
types of OpenAI's Python package 3.57, vLLM 0.32 (vllm/entrypoints/openai/*/protocol.py), SGLang
(python/sglang/srt/entrypoints/openai/protocol.py), llama.cpp (tools/server/README.md), Ollama.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

OPENAI = "OpenAI"
TGI = "TGI"
VLLM = "vLLM"
BOTH = "OpenAI, vLLM"
OTHERS = "others"
"""SGLang, llama.cpp, Ollama and NVIDIA NIM: the names that state a constraint on the text."""


class Parameter(NamedTuple):
    """A parameter of a request.

    Attributes:
        api: the APIs that have it.
        value: a value that asks for something, so not the default.
        beside: parameters that are required with it.
    """

    api: str
    value: Any
    beside: Mapping[str, Any] = {}


_SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}
_STREAM = {"stream": True}
_TOOL = {
    "type": "function",
    "function": {"name": "look", "parameters": {"type": "object", "properties": {}}},
}
_SAMPLED = {"do_sample": True}

GENERATE: Mapping[str, Parameter] = {
    "adapter_id": Parameter(TGI, "a/b"),
    "best_of": Parameter(TGI, 2, _SAMPLED),
    "decoder_input_details": Parameter(TGI, True),
    "details": Parameter(TGI, True),
    "do_sample": Parameter(TGI, True),
    "frequency_penalty": Parameter(TGI, 0.5),
    "grammar": Parameter(TGI, {"type": "json", "value": _SCHEMA}),
    "max_new_tokens": Parameter(TGI, 2),
    "repetition_penalty": Parameter(TGI, 1.1),
    "return_full_text": Parameter(TGI, True),
    "seed": Parameter(TGI, 1, _SAMPLED),
    "stop": Parameter(TGI, ["x"]),
    "temperature": Parameter(TGI, 0.5),
    "top_k": Parameter(TGI, 5),
    "top_n_tokens": Parameter(TGI, 2, {"details": True}),
    "top_p": Parameter(TGI, 0.5),
    "truncate": Parameter(TGI, 5),
    "typical_p": Parameter(TGI, 0.5),
    "watermark": Parameter(TGI, True),
}
"""Fields of `parameters` on TGI's routes. Those of other clients are in `server.http.dialects.tgi.legacy`."""

_CONSTRAINTS: Mapping[str, Parameter] = {
    "ebnf": Parameter(OTHERS, 'root ::= "a"'),
    "format": Parameter(OTHERS, _SCHEMA),
    "grammar": Parameter(OTHERS, 'root ::= "a"'),
    "grammar_string": Parameter(OTHERS, 'root ::= "a"'),
    "guided_choice": Parameter(OTHERS, ["a"]),
    "guided_decoding_backend": Parameter(OTHERS, "auto"),
    "guided_grammar": Parameter(OTHERS, 'root ::= "a"'),
    "guided_json": Parameter(OTHERS, _SCHEMA),
    "guided_regex": Parameter(OTHERS, "a+"),
    "guided_whitespace_pattern": Parameter(OTHERS, " ?", {"guided_json": _SCHEMA}),
    "json_schema": Parameter(OTHERS, _SCHEMA),
    "logits_processors": Parameter(OTHERS, ["a"]),
    "nvext": Parameter(OTHERS, {"guided_regex": "a+"}),
    "regex": Parameter(OTHERS, "a+"),
    "regex_pattern": Parameter(OTHERS, "a+"),
    "stop_regex": Parameter(OTHERS, "a+"),
    "structural_tag": Parameter(
        OTHERS, {"type": "structural_tag", "format": {"type": "const_string", "value": "a"}}
    ),
}

_SHARED: Mapping[str, Parameter] = {
    **_CONSTRAINTS,
    "allowed_token_ids": Parameter(VLLM, [1, 2]),
    "bad_words": Parameter(VLLM, ["x"]),
    "cache_salt": Parameter(VLLM, "salt"),
    "ec_transfer_params": Parameter(VLLM, {"a": 1}),
    "frequency_penalty": Parameter(BOTH, 0.5),
    "ignore_eos": Parameter(VLLM, True),
    "include_stop_str_in_output": Parameter(VLLM, True, {"stop": ["x"]}),
    "kv_transfer_params": Parameter(VLLM, {"a": 1}),
    "length_penalty": Parameter(VLLM, 1.5),
    "logit_bias": Parameter(BOTH, {"5": 1}),
    "logprob_token_ids": Parameter(VLLM, [1]),
    "min_p": Parameter(VLLM, 0.1),
    "min_tokens": Parameter(VLLM, 1),
    "model": Parameter(BOTH, "tgi"),
    "n": Parameter(BOTH, 2),
    "n_predict": Parameter(OTHERS, 2),
    "n_probs": Parameter(OTHERS, 2),
    "presence_penalty": Parameter(BOTH, 0.5),
    "priority": Parameter(VLLM, 1),
    "prompt_logprobs": Parameter(VLLM, 1),
    "repeat_penalty": Parameter(OTHERS, 1.1),
    "repetition_detection": Parameter(VLLM, {"max_pattern_size": 4, "min_count": 3}),
    "repetition_penalty": Parameter(VLLM, 1.1),
    "request_id": Parameter(VLLM, "mine"),
    "response_format": Parameter(
        BOTH, {"type": "json_schema", "json_schema": {"name": "a", "schema": _SCHEMA}}
    ),
    "return_mm_kwargs": Parameter(VLLM, False),
    "return_token_ids": Parameter(VLLM, True),
    "return_token_offsets": Parameter(VLLM, True),
    "return_tokens_as_token_ids": Parameter(VLLM, True),
    "routed_experts_prompt_start": Parameter(VLLM, 1),
    "seed": Parameter(BOTH, 1),
    "session_id": Parameter(VLLM, "mine"),
    "skip_special_tokens": Parameter(VLLM, False),
    "spaces_between_special_tokens": Parameter(VLLM, False),
    "stop": Parameter(BOTH, ["x"]),
    "stop_token_ids": Parameter(VLLM, [1]),
    "stream": Parameter(BOTH, True),
    "stream_interval": Parameter(VLLM, 2, _STREAM),
    "stream_options": Parameter(BOTH, {"include_usage": True}, _STREAM),
    "stop_sequences": Parameter(OTHERS, ["x"]),
    "structured_outputs": Parameter(VLLM, {"regex": "a+"}),
    "temperature": Parameter(BOTH, 0.5),
    "thinking_token_budget": Parameter(VLLM, 5),
    "top_k": Parameter(VLLM, 5),
    "top_p": Parameter(BOTH, 0.5),
    "truncate_prompt_tokens": Parameter(VLLM, 5),
    "truncation_side": Parameter(VLLM, "right", {"truncate_prompt_tokens": 5}),
    "use_beam_search": Parameter(VLLM, True),
    "user": Parameter(BOTH, "someone"),
    "vllm_xargs": Parameter(VLLM, {"a": 1}),
    "watermarking": Parameter(VLLM, True),
}

COMPLETIONS: Mapping[str, Parameter] = {
    **_SHARED,
    "add_special_tokens": Parameter(VLLM, False),
    "best_of": Parameter(OPENAI, 2),
    "echo": Parameter(BOTH, True),
    "logprobs": Parameter(BOTH, 2),
    "max_tokens": Parameter(BOTH, 2),
    "prompt": Parameter(BOTH, [1, 2]),
    "prompt_embeds": Parameter(VLLM, "AAAA"),
    "suffix": Parameter(BOTH, "x"),
}
"""Fields of /v1/completions."""

CHAT: Mapping[str, Parameter] = {
    **_SHARED,
    "add_generation_prompt": Parameter(VLLM, True),
    "add_special_tokens": Parameter(VLLM, True),
    "audio": Parameter(OPENAI, {"voice": "a", "format": "wav"}),
    "chat_template": Parameter(VLLM, "{{ messages }}"),
    "chat_template_kwargs": Parameter(VLLM, {"a": 1}),
    "continue_final_message": Parameter(VLLM, True),
    "documents": Parameter(VLLM, [{"title": "a", "text": "b"}]),
    "echo": Parameter(VLLM, True),
    "function_call": Parameter(OPENAI, "auto", {"functions": [_TOOL["function"]]}),
    "functions": Parameter(OPENAI, [_TOOL["function"]]),
    "include_reasoning": Parameter(VLLM, False),
    "logprobs": Parameter(BOTH, True),
    "max_completion_tokens": Parameter(BOTH, 2),
    "max_tokens": Parameter(BOTH, 2),
    "media_io_kwargs": Parameter(VLLM, {"image": {}}),
    "messages": Parameter(BOTH, [{"role": "user", "content": "hi"}]),
    "metadata": Parameter(OPENAI, {"a": "b"}),
    "mm_processor_kwargs": Parameter(VLLM, {"a": 1}),
    "modalities": Parameter(OPENAI, ["text", "audio"]),
    "moderation": Parameter(OPENAI, {"model": "a"}),
    "parallel_tool_calls": Parameter(BOTH, False, {"tools": [_TOOL]}),
    "prediction": Parameter(OPENAI, {"type": "content", "content": "a"}),
    "prompt_cache_key": Parameter(OPENAI, "a"),
    "prompt_cache_options": Parameter(OPENAI, {"mode": "explicit"}),
    "prompt_cache_retention": Parameter(OPENAI, "24h"),
    "reasoning_effort": Parameter(BOTH, "low"),
    "return_prompt_text": Parameter(VLLM, True),
    "safety_identifier": Parameter(OPENAI, "a"),
    "service_tier": Parameter(OPENAI, "flex"),
    "store": Parameter(OPENAI, True),
    "tool_choice": Parameter(BOTH, "required", {"tools": [_TOOL]}),
    "tools": Parameter(BOTH, [_TOOL]),
    "top_logprobs": Parameter(BOTH, 2, {"logprobs": True}),
    "verbosity": Parameter(OPENAI, "low"),
    "web_search_options": Parameter(OPENAI, {"search_context_size": "low"}),
}
"""Fields of /v1/chat/completions."""

_RESPONSE_TOOL = {"type": "function", "name": "look", "parameters": {"type": "object"}}

RESPONSES: Mapping[str, Parameter] = {
    **_CONSTRAINTS,
    **{name: _SHARED[name] for name in ("model", "stream", "temperature", "top_p", "user")},
    **{
        name: _SHARED[name]._replace(api=VLLM)
        for name in (
            "cache_salt", "ignore_eos", "include_stop_str_in_output", "logit_bias", "priority",
            "repetition_penalty", "request_id", "seed", "skip_special_tokens", "stop",
            "structured_outputs", "top_k", "vllm_xargs",
        )
    },
    **{
        name: CHAT[name]
        for name in (
            "metadata", "mm_processor_kwargs", "moderation", "prompt_cache_key",
            "prompt_cache_options", "prompt_cache_retention", "safety_identifier", "service_tier",
            "store",
        )
    },
    "access_programs": Parameter(OPENAI, ["a"]),
    "background": Parameter(BOTH, True),
    "background_options": Parameter(OPENAI, {"a": 1}),
    "context_management": Parameter(OPENAI, [{"type": "compaction"}]),
    "conversation": Parameter(OPENAI, "conv_1"),
    "enable_response_messages": Parameter(VLLM, True),
    "image": Parameter(OPENAI, {"a": 1}),
    "include": Parameter(BOTH, ["message.output_text.logprobs"]),
    "input": Parameter(BOTH, [{"role": "user", "content": "hi"}]),
    "instructions": Parameter(BOTH, "Be brief."),
    "max_output_tokens": Parameter(BOTH, 2),
    "max_tool_calls": Parameter(BOTH, 1),
    "parallel_tool_calls": Parameter(BOTH, False),
    "previous_input_messages": Parameter(VLLM, [{"role": "user", "content": "hi"}]),
    "previous_response": Parameter(VLLM, {"id": "resp_1"}),
    "previous_response_id": Parameter(BOTH, "resp_1"),
    "prompt": Parameter(OPENAI, {"id": "pmpt_1"}),
    "reasoning": Parameter(BOTH, {"effort": "low"}),
    "stream_options": Parameter(OPENAI, {"include_obfuscation": True}, _STREAM),
    "text": Parameter(
        BOTH, {"format": {"type": "json_schema", "name": "a", "schema": _SCHEMA}}
    ),
    "tool_choice": Parameter(BOTH, "required", {"tools": [_RESPONSE_TOOL]}),
    "tools": Parameter(BOTH, [_RESPONSE_TOOL]),
    "top_logprobs": Parameter(BOTH, 2, {"include": ["message.output_text.logprobs"]}),
    "truncation": Parameter(BOTH, "auto"),
}  # fmt: skip
"""Fields of /v1/responses."""

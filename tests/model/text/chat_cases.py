"""Chat templates in the shapes that checkpoints have, and tokenizers of the kinds that they are used with."""

from __future__ import annotations

import json
from pathlib import Path

import tokenizers
from tokenizers import (
    AddedToken,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)

from model.text.chat_template import ChatTemplate
from model.text.tokenizer import Tokenizer

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Größe, naïve, café: 你好世界 and 🙂🙃 in one text.",
    "def f(x):\n    return x  # spaces   and\ttabs",
    "system user assistant model tool\n\nYou are a helpful assistant.",
] * 5

CHATML = """{% for message in messages %}{{ '<|im_start|>' + message['role'] + '\n' + message['content'] + \
'<|im_end|>' + '\n' }}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}{% endif %}"""

QWEN25 = """{%- if tools %}
    {{- '<|im_start|>system\\n' }}
    {%- if messages[0].role == 'system' %}{{- messages[0].content }}{%- else %}{{- 'Be helpful.' }}{%- endif %}
    {{- "\\n\\n<tools>" }}
    {%- for tool in tools %}{{- "\\n" }}{{- tool | tojson }}{%- endfor %}
    {{- "\\n</tools><|im_end|>\\n" }}
{%- elif messages[0].role == 'system' %}
    {{- '<|im_start|>system\\n' + messages[0].content + '<|im_end|>\\n' }}
{%- else %}
    {{- '<|im_start|>system\\nBe helpful.<|im_end|>\\n' }}
{%- endif %}
{%- for message in messages %}
    {%- if message.role == 'user' or (message.role == 'system' and not loop.first)
        or (message.role == 'assistant' and not message.tool_calls) %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>' + '\\n' }}
    {%- elif message.role == 'assistant' %}
        {{- '<|im_start|>' + message.role }}
        {%- if message.content %}{{- '\\n' + message.content }}{%- endif %}
        {%- for tool_call in message.tool_calls %}
            {%- if tool_call.function is defined %}{%- set tool_call = tool_call.function %}{%- endif %}
            {{- '\\n<tool_call>\\n{"name": "' }}{{- tool_call.name }}
            {{- '", "arguments": ' }}{{- tool_call.arguments | tojson }}{{- '}\\n</tool_call>' }}
        {%- endfor %}
        {{- '<|im_end|>\\n' }}
    {%- elif message.role == 'tool' %}
        {%- if loop.index0 == 0 or messages[loop.index0 - 1].role != 'tool' %}{{- '<|im_start|>user' }}{%- endif %}
        {{- '\\n<tool_response>\\n' }}{{- message.content }}{{- '\\n</tool_response>' }}
        {%- if loop.last or messages[loop.index0 + 1].role != 'tool' %}{{- '<|im_end|>\\n' }}{%- endif %}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
{%- endif %}
"""

QWEN3 = """{%- set ns = namespace(last=messages|length - 1, searching=true) %}
{%- for message in messages[::-1] %}
    {%- if ns.searching and message.role == 'user' %}
        {%- set ns.searching = false %}{%- set ns.last = messages|length - loop.index %}
    {%- endif %}
{%- endfor %}
{%- for message in messages %}
    {%- if message.role == 'assistant' %}
        {%- set content = message.content %}{%- set thought = '' %}
        {%- if '</think>' in content %}
            {%- set thought = content.split('</think>')[0].rstrip('\\n').split('<think>')[-1].lstrip('\\n') %}
            {%- set content = content.split('</think>')[-1].lstrip('\\n') %}
        {%- endif %}
        {%- if loop.index0 > ns.last and thought %}
            {{- '<|im_start|>assistant\\n<think>\\n' + thought.strip('\\n') + '\\n</think>\\n\\n' + content }}
        {%- else %}
            {{- '<|im_start|>assistant\\n' + content }}
        {%- endif %}
        {{- '<|im_end|>\\n' }}
    {%- else %}
        {{- '<|im_start|>' + message.role + '\\n' + message.content + '<|im_end|>\\n' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}
    {{- '<|im_start|>assistant\\n' }}
    {%- if enable_thinking is defined and enable_thinking is false %}{{- '<think>\\n\\n</think>\\n\\n' }}{%- endif %}
{%- endif %}
"""

LLAMA3 = """{% set loop_messages = messages %}{% for message in loop_messages %}{% set content = '<|start_header_id|>' \
+ message['role'] + '<|end_header_id|>\n\n'+ message['content'] | trim + '<|eot_id|>' %}{% if loop.index0 == 0 %}\
{% set content = bos_token + content %}{% endif %}{{ content }}{% endfor %}{% if add_generation_prompt %}\
{{ '<|start_header_id|>assistant<|end_header_id|>\n\n' }}{% endif %}"""

LLAMA31 = """{{- bos_token }}
{%- if messages[0]['role'] == 'system' %}
    {%- set system = messages[0]['content']|trim %}{%- set messages = messages[1:] %}
{%- else %}{%- set system = "" %}{%- endif %}
{{- "<|start_header_id|>system<|end_header_id|>\\n\\n" }}
{%- if tools is not none %}{{- "Environment: ipython\\n" }}{%- endif %}
{{- "Cutting Knowledge Date: December 2023\\n\\n" }}{{- system }}{{- "<|eot_id|>" }}
{%- for message in messages %}
    {%- if 'tool_calls' in message %}
        {{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n<|python_tag|>' }}
        {%- for key, value in message.tool_calls[0].function.arguments | items %}{{ key ~ '=' ~ value }}{%- endfor %}
        {{- "<|eot_id|>" }}
    {%- else %}
        {{- '<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n' + message['content'] | trim }}
        {{- '<|eot_id|>' }}
    {%- endif %}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|start_header_id|>assistant<|end_header_id|>\\n\\n' }}{%- endif %}
"""

MISTRAL = """{{ bos_token }}{% for message in messages %}{% if (message['role'] == 'user') != (loop.index0 % 2 == 0) %}\
{{ raise_exception('Roles must alternate: user, assistant, user') }}{% endif %}{% if message['role'] == 'user' %}\
{{ '[INST] ' + message['content'] + ' [/INST]' }}{% elif message['role'] == 'assistant' %}{{ ' ' + message['content'] \
+ eos_token}}{% else %}{{ raise_exception('Only user and assistant') }}{% endif %}{% endfor %}"""

SMOLLM2 = """{% for message in messages %}{% if loop.first and messages[0]['role'] != 'system' %}\
{{ '<|im_start|>system\nYou are SmolLM<|im_end|>\n' }}{% endif %}{{'<|im_start|>' + message['role'] + '\n' + \
message['content'] + '<|im_end|>' + '\n'}}{% endfor %}{% if add_generation_prompt %}{{ '<|im_start|>assistant\n' }}\
{% endif %}"""

GEMMA = """{{ bos_token }}{% if messages[0]['role'] == 'system' %}{{ raise_exception('System role not supported') }}\
{% endif %}{% for message in messages %}{% if (message['role'] == 'assistant') %}{% set role = 'model' %}{% else %}\
{% set role = message['role'] %}{% endif %}{{ '<start_of_turn>' + role + '\n' + message['content'] | trim + \
'<end_of_turn>\n' }}{% endfor %}{% if add_generation_prompt %}{{'<start_of_turn>model\n'}}{% endif %}"""

PHI3 = """{% for message in messages %}{% if message['role'] == 'system' %}{{'<|system|>\n' + message['content'] + \
'<|end|>\n'}}{% elif message['role'] == 'user' %}{{'<|user|>\n' + message['content'] + '<|end|>\n'}}{% elif \
message['role'] == 'assistant' %}{{'<|assistant|>\n' + message['content'] + '<|end|>\n'}}{% endif %}{% endfor %}\
{% if add_generation_prompt %}{{ '<|assistant|>\n' }}{% else %}{{ eos_token }}{% endif %}"""

PHI4_MINI = """{% for message in messages %}{{ '<|' + message['role'] + '|>' + message['content'] + '<|end|>' }}\
{% endfor %}{% if add_generation_prompt %}{{ '<|assistant|>' }}{% else %}{{ eos_token }}{% endif %}"""

GLM = """[gMASK]<sop>{% for item in messages %}<|{{ item['role'] }}|>
{{ item['content'] }}{% endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""

ZEPHYR = """{% for message in messages %}
{% if message['role'] == 'user' %}
{{ '<|user|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'system' %}
{{ '<|system|>\n' + message['content'] + eos_token }}
{% elif message['role'] == 'assistant' %}
{{ '<|assistant|>\n'  + message['content'] + eos_token }}
{% endif %}
{% if loop.last and add_generation_prompt %}
{{ '<|assistant|>' }}
{% endif %}
{% endfor %}"""

PARTS = """{% for message in messages %}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{% else %}{% for part in message.content %}\
{% if part.type == 'text' %}{{ part.text }}{% endif %}{% endfor %}{% endif %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""

ONLY_PARTS = """{% for message in messages %}{{ '<|im_start|>' ~ message.role ~ ':' }}{% for part in message.content %}\
{{ part.text }}{% endfor %}<|im_end|>
{% endfor %}"""

BYTE_LEVEL_SPECIAL = [
    "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|begin_of_text|>", "<|start_header_id|>", "<|end_header_id|>",
    "<|eot_id|>", "<|python_tag|>", "<|system|>", "<|user|>", "<|assistant|>", "<|end|>", "<|tool|>",
]  # fmt: skip
SENTENCEPIECE_SPECIAL = [
    "<unk>", "<s>", "</s>", "[INST]", "[/INST]", "<start_of_turn>", "<end_of_turn>", "<|im_start|>", "<|im_end|>",
    "<|user|>", "<|assistant|>", "<|system|>", "<|end|>", "[gMASK]", "<sop>",
]  # fmt: skip


def byte_level() -> tokenizers.Tokenizer:
    """Qwen, Llama 3, SmolLM2: byte-level BPE; special tokens come after the vocabulary."""
    library = tokenizers.Tokenizer(models.BPE(ignore_merges=True))
    library.normalizer = normalizers.NFC()
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    trainer = trainers.BpeTrainer(vocab_size=420, initial_alphabet=alphabet, show_progress=False)
    library.train_from_iterator(CORPUS, trainer)
    library.add_special_tokens(
        [AddedToken(t, special=True, normalized=False) for t in BYTE_LEVEL_SPECIAL]
    )
    library.add_tokens(
        [AddedToken(t, normalized=False) for t in ("<think>", "</think>", "<tool_call>")]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<|begin_of_text|> $A",
        special_tokens=[("<|begin_of_text|>", library.token_to_id("<|begin_of_text|>"))],
    )
    return library


def sentencepiece(kind: str) -> tokenizers.Tokenizer:
    """Llama 2, Phi-3, Mistral, Gemma: BPE over text with byte fallback; special tokens are in the vocabulary.

    Merges lead to `</s>` and `<s>`, as in checkpoints that were converted from SentencePiece.

    Args:
        kind: "legacy" prepends a space to every piece, "first" to the first one, "gemma" to none; "phi" is "legacy"
            with tokens that swallow the space after them.
    """
    pieces = [*SENTENCEPIECE_SPECIAL, *(f"<0x{byte:02X}>" for byte in range(256))]
    letters = sorted(
        {letter for text in CORPUS for letter in text if letter.isascii() and letter != "\n"}
    )
    pieces += ["▁", *(letter for letter in letters if letter != " "), *"<>/[]|_"]
    pairs = [
        ("<", "/"),
        ("s", ">"),
        ("</", "s>"),
        ("<", "s>"),
        ("▁", "t"),
        ("h", "e"),
        ("▁t", "he"),
        ("▁", "a"),
        ("o", "g"),
    ]
    pieces += ["".join(pair) for pair in pairs]
    vocabulary = {piece: i for i, piece in enumerate(dict.fromkeys(pieces))}
    library = tokenizers.Tokenizer(
        models.BPE(vocabulary, pairs, byte_fallback=True, unk_token="<unk>", fuse_unk=True)
    )
    if kind == "first":
        library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    elif kind == "gemma":
        library.normalizer = normalizers.Replace(" ", "▁")
        library.pre_tokenizer = pre_tokenizers.Split(" ", "merged_with_previous")
    else:
        library.normalizer = normalizers.Sequence(
            [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        )
    library.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    )
    library.add_special_tokens(
        [
            AddedToken(t, special=True, normalized=False, rstrip=kind == "phi")
            for t in SENTENCEPIECE_SPECIAL
        ]
    )
    library.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", 1)]
    )
    return library


def unigram() -> tokenizers.Tokenizer:
    """A Unigram model whose vocabulary contains the special tokens as pieces."""
    words = [
        "▁",
        "▁the",
        "▁dog",
        "s",
        "<",
        ">",
        "/",
        "|",
        "im",
        "_",
        "start",
        "end",
        "user",
        "\n",
        "a",
        "e",
        "o",
    ]
    vocabulary = [(piece, -float(i)) for i, piece in enumerate([*SENTENCEPIECE_SPECIAL, *words])]
    library = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, False))
    library.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme="always")
    library.decoder = decoders.Metaspace(prepend_scheme="always")
    library.add_special_tokens(SENTENCEPIECE_SPECIAL)
    return library


LIBRARIES = {
    "byte_level": byte_level,
    "legacy": lambda: sentencepiece("legacy"),
    "first": lambda: sentencepiece("first"),
    "gemma": lambda: sentencepiece("gemma"),
    "phi": lambda: sentencepiece("phi"),
    "unigram": unigram,
}
# Template and the tokenizer that it is used with.
CASES = {
    "chatml": (CHATML, "byte_level"),
    "qwen2.5": (QWEN25, "byte_level"),
    "qwen3": (QWEN3, "byte_level"),
    "llama3": (LLAMA3, "byte_level"),
    "llama3.1": (LLAMA31, "byte_level"),
    "smollm2": (SMOLLM2, "byte_level"),
    "phi4-mini": (PHI4_MINI, "byte_level"),
    "parts": (PARTS, "byte_level"),
    "mistral": (MISTRAL, "legacy"),
    "mistral, newer tokenizer": (MISTRAL, "first"),
    "gemma": (GEMMA, "gemma"),
    "phi3": (PHI3, "phi"),
    "phi3, no strip": (PHI3, "legacy"),
    "zephyr": (ZEPHYR, "first"),
    "glm": (GLM, "gemma"),
    "chatml, unigram": (CHATML, "unigram"),
}


def config_of(kind: str) -> dict[str, str]:
    if kind == "byte_level":
        return {"bos_token": "<|begin_of_text|>", "eos_token": "<|endoftext|>"}
    return {"bos_token": "<s>", "eos_token": "</s>"}


def save(folder: Path, kind: str, **config: object) -> Path:
    """Write a checkpoint's tokenizer files."""
    LIBRARIES[kind]().save(str(folder / "tokenizer.json"))
    (folder / "tokenizer_config.json").write_text(json.dumps(config_of(kind) | config))
    return folder


def load(kind: str, template: str) -> tuple[Tokenizer, ChatTemplate]:
    config = config_of(kind)
    tokenizer = Tokenizer(LIBRARIES[kind](), **config)
    return tokenizer, ChatTemplate({"default": template}, tokenizer)

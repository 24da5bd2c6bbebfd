"""Tools, calls in every format, and tokenizers with and without tokens for the parts of a call."""

import json

from tokenizers import AddedToken, decoders, models, pre_tokenizers
from tokenizers import Tokenizer as LibraryTokenizer

from model.sampling.grammar import GrammarTokenizer, compile_matcher, serialize
from model.text.tokenizer import Tokenizer
from model.text.tools.definitions import make_tool

WEATHER = {
    "type": "object",
    "properties": {
        "city": {"type": "string", "minLength": 1},
        "days": {"type": "integer", "minimum": 1},
        "unit": {"type": "string", "enum": ["C", "F"]},
    },
    "required": ["city"],
    "additionalProperties": False,
}
SCHEMAS = {"weather": WEATHER, "now": None}
CALLS = [
    ("weather", {"city": 'Köln "a}\\', "days": 3, "unit": "C"}),
    ("now", {}),
    ("weather", {"city": "{[</x>"}),
]
# As the models' own templates write them.
TEXTS = {
    "hermes": (
        '<tool_call>\n{"name": "weather", "arguments": {"city": "Köln \\"a}\\\\", "days": 3, '
        '"unit": "C"}}\n</tool_call>'
        '\n<tool_call>\n{"name": "now", "arguments": {}}\n</tool_call>'
        '\n<tool_call>\n{"name": "weather", "arguments": {"city": "{[</x>"}}\n</tool_call>'
    ),
    "qwen3-coder": (
        '<tool_call>\n<function=weather>\n<parameter=city>\nKöln "a}\\\n</parameter>\n<parameter=days>'
        "\n3\n</parameter>\n"
        "<parameter=unit>\nC\n</parameter>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=now>\n</function>\n</tool_call>"
        "\n<tool_call>\n<function=weather>\n<parameter=city>\n{[</x>\n</parameter>\n</function>\n</tool_call>"
    ),
    "llama3": (
        '<|python_tag|>{"name": "weather", "parameters": {"city": "Köln \\"a}\\\\", "days": 3, "unit": "C"}}; '
        '{"name": "now", "parameters": {}}; {"name": "weather", "parameters": {"city": "{[</x>"}}'
    ),
    "mistral": (
        '[TOOL_CALLS][{"name": "weather", "arguments": {"city": "Köln \\"a}\\\\", "days": 3, "unit": "C"}}, '
        '{"name": "now", "arguments": {}}, {"name": "weather", "arguments": {"city": "{[</x>"}}]'
    ),
    "mistral-args": (
        '[TOOL_CALLS]weather[ARGS]{"city": "Köln \\"a}\\\\", "days": 3, "unit": "C"}'
        '[TOOL_CALLS]now[ARGS]{}[TOOL_CALLS]weather[ARGS]{"city": "{[</x>"}'
    ),
}


def make_tools(format_, schemas=SCHEMAS):
    return [make_tool(format_, name, schema) for name, schema in schemas.items()]


def make_tokenizer(special=(), added=()):
    """Make a byte-level tokenizer whose further tokens are `</s>` and these."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    library = LibraryTokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    library.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    library.decoder = decoders.ByteLevel()
    library.add_special_tokens([AddedToken(text, special=True) for text in ("</s>", *special)])
    library.add_tokens([AddedToken(text, normalized=False) for text in added])
    return Tokenizer(library, eos_token="</s>")


def follows(grammar, tokenizer, text):
    """Return whether a text is complete by a Lark grammar, or None if it only begins such a text."""
    matcher = compile_matcher(
        GrammarTokenizer(tokenizer, tokenizer.vocab_size), serialize("lark", grammar)
    )
    if not all(matcher.accept(token_id) for token_id in tokenizer.encode(text)):
        return False
    return True if matcher.is_accepting else None


class Message:
    """Collects what a parser returns."""

    def __init__(self):
        self.content = ""
        self.calls = []
        self.trailing = ""

    def add(self, delta):
        self.content += delta.content
        for call in delta.calls:
            if call.name is not None:
                assert call.index == len(self.calls)
                self.calls.append([call.name, ""])
            assert call.index == len(self.calls) - 1
            self.calls[-1][1] += call.arguments
        self.trailing += delta.trailing

    def decoded(self):
        return [(name, json.loads(arguments)) for name, arguments in self.calls]


def parse(parser, pieces, **end):
    message = Message()
    for piece in pieces:
        message.add(parser.push(piece))
    message.add(parser.finish(**end))
    return message

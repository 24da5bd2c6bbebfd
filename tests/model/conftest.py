"""Fixtures: tokenizers trained on a few sentences, one for each kind of decoder, the bundled one, and samplers."""

from __future__ import annotations

import pytest
import tokenizers
from tokenizers import decoders, models, normalizers, pre_tokenizers, processors, trainers

from model.hub.resolve import BUNDLED, resolve
from model.sampling.grammar import GrammarTokenizer, check, compile_matcher, serialize
from model.sampling.sampler import Sampler
from model.text.tokenizer import Tokenizer
from tests.model.sampling import plain_device

CORPUS = [
    "The quick brown fox jumps over the lazy dog. The dog sleeps.",
    "Größe, naïve, café: 你好世界 and 🙂🙃 in one text.",
    "def f(x):\n    return x  # spaces   and\ttabs",
] * 5
SPECIAL = ["<unk>", "<s>", "</s>", "<|im_start|>"]


def byte_level() -> tokenizers.Tokenizer:
    """GPT-2, Llama 3, Qwen: every token is a run of bytes."""
    tokenizer = tokenizers.Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=SPECIAL,
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    # Added tokens are stored as plain text, not in the byte alphabet; the library distinguishes them token by token.
    tokenizer.add_tokens(["<tool call>", "日本", "éé"])
    return tokenizer


def byte_fallback(*, strip: bool) -> tokenizers.Tokenizer:
    """Llama 2, Mistral (both strip the first space) and Gemma: tokens are text, or bytes for rare characters."""
    tokenizer = tokenizers.Tokenizer(models.BPE(byte_fallback=True, unk_token="<unk>"))
    tokenizer.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
        if strip
        else [normalizers.Replace(" ", "▁")]
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    tokenizer.decoder = decoders.Sequence(steps + [decoders.Strip(" ", 1, 0)] * strip)
    names = [f"<0x{byte:02X}>" for byte in range(256)]
    tokenizer.train_from_iterator(
        [line.replace("世界", "") for line in CORPUS],
        trainers.BpeTrainer(vocab_size=380, special_tokens=SPECIAL + names, show_progress=False),
    )
    # The trainer marks the byte tokens as special, unlike real checkpoints: rebuild the tokenizer.
    model = tokenizers.models.BPE(
        vocab={**tokenizer.get_vocab(with_added_tokens=True)},
        merges=[],
        byte_fallback=True,
        unk_token="<unk>",
    )
    rebuilt = tokenizers.Tokenizer(model)
    rebuilt.normalizer, rebuilt.decoder = tokenizer.normalizer, tokenizer.decoder
    rebuilt.add_special_tokens(SPECIAL)
    rebuilt.add_tokens(["▁▁x", tokenizers.AddedToken("<user>", normalized=False)])
    rebuilt.post_processor = processors.TemplateProcessing(
        single="<s> $A", special_tokens=[("<s>", rebuilt.token_to_id("<s>"))]
    )
    return rebuilt


def metaspace(scheme: str) -> tokenizers.Tokenizer:
    """Unigram models converted from SentencePiece without byte fallback."""
    words = ["▁", "▁the", "▁dog", "s", "▁▁", "é", "你", "a▁b"]
    vocabulary = [(token, -float(i)) for i, token in enumerate(SPECIAL + words)]
    tokenizer = tokenizers.Tokenizer(models.Unigram(vocabulary, 0, False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=scheme)
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def word_piece() -> tokenizers.Tokenizer:
    """A decoder without known rules: the library decodes the last tokens."""
    words = ["the", "dog", "##s", "##leep", "!", "n't", "你", ",", "'"]
    vocabulary = {token: i for i, token in enumerate([*SPECIAL, *words])}
    tokenizer = tokenizers.Tokenizer(models.WordPiece(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    tokenizer.decoder = decoders.WordPiece()
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def joined_by_spaces() -> tokenizers.Tokenizer:
    tokenizer = word_piece()
    tokenizer.decoder = None
    return tokenizer


LIBRARIES = {
    "byte_level": byte_level,
    "byte_fallback": lambda: byte_fallback(strip=False),
    "byte_fallback_strip": lambda: byte_fallback(strip=True),
    "metaspace_always": lambda: metaspace("always"),
    "metaspace_never": lambda: metaspace("never"),
    "word_piece": word_piece,
    "no_decoder": joined_by_spaces,
}


@pytest.fixture(scope="session")
def libraries() -> dict[str, tokenizers.Tokenizer]:
    return {name: build() for name, build in LIBRARIES.items()}


@pytest.fixture(scope="session")
def tokenizer() -> Tokenizer:
    """The bundled model's tokenizer."""
    return Tokenizer.from_folder(resolve(BUNDLED))


@pytest.fixture(scope="session")
def vocabulary(tokenizer) -> GrammarTokenizer:
    """The same as grammars are matched against it."""
    return GrammarTokenizer(tokenizer, 4096, [0])


@pytest.fixture(scope="session")
def accepts(tokenizer, vocabulary):
    """Return a function that tells whether a whole text follows a constraint."""

    def ask(kind, value, text):
        grammar = serialize(kind, value)
        check(vocabulary, grammar)
        matcher = compile_matcher(vocabulary, grammar)
        ids = tokenizer.encode(text, add_special_tokens=False)
        return all(matcher.accept(i) for i in ids) and matcher.is_accepting

    return ask


@pytest.fixture(params=["host", "device"])
def forward(request):
    """Both samplers; the device sampler runs on the CPU."""
    return Sampler().forward if request.param == "host" else plain_device.sample

"""Which patterns take a time proportional to the text."""

import time

import pytest
import tokenizers
from tokenizers import models, pre_tokenizers

from model.text.bounded.patterns import is_linear

GPT_2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"
LLAMA_3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
    r"|\s+(?!\S)|\s+"
)
O200K = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*(?i:'s|'t|'re|'ve|'m|'ll|'d)?"
    r"|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
DEEPSEEK = (
    r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
BUNDLED = r"\n|(?<![^\n]) +| ?[\p{L}_][\p{L}\p{N}_]*| ?\p{N}{1,3}| ?[(\[{]| ?[^\s\p{L}\p{N}_(\[{]+| +(?=\s)|[^\S\n]+"
LINEAR = [
    GPT_2, LLAMA_3, O200K, DEEPSEEK, BUNDLED, " ", r"\s+", r" {2,}", r"\d|\p{P}", r"\p{N}{1,3}", r"[\r\n]",
    "[一-龥぀-ゟ-ヿ]+", r"\s?[A-Za-zµÀ-ÖØ-öø-ƺ]+", r"\s?\p{L}+|\s?[!-/:-~]+", r"[[:alpha:]]+", r"\(+", r"[\]a]+",
]  # fmt: skip
NOT_LINEAR = [
    "(a+)+$", "(a|a)*b", "(a|aa)+$", "a*a*a*b", "a+b", r"\s+$", ".*x", "a+(?=b)", "a+(?!b)", "(?=a+b)a", "(?<=a+)b",
    r"(\w+)\1", r"(?<n>a)\g<n>*", r"(?<n>a)\k<n>", "(?~abc)", "(?(1)a|b)", "(?i)a+b", r"a+\Kb", r"\X+b", r"\R+b",
    "a?" * 30 + "a" * 30, "(?:a|a)" * 30 + "b", "a+(?:" + "b?" * 30 + "b" * 30 + "c)?", "a" + "{0,9}" * 20 + "b",
    "a{1,1000}{1,1000}b", "a{0,50}{0,50}b", "a{1,3}+b", "a**b", "(a{1,100}){1,100}", "a{0,10000000}b", "a{,99999}b",
    "a{1,200}" * 3 + "b", "(?:a+)?b", "a+(?:b+)?c", "a+b?c", "x*(?:y|z)", "(?x: a +) +b", r"\s*[\r\n]+", "[a", "(a",
    "a)", "]", "a{", "(?", "(?<", "\\", r"\p{L", "a+|a+b",
    # These hold what the library reads as a control character, a literal, or a range from high to low.
    r"[\c[](a|a)*b]", r"\C-[(a|a)*b]", r"\c[(a|a)*b]", r"\M-[(a|a)*b]", "a+b{,}", "a+b{}",
    "a{1,0}" + "b{0,99}" * 3 + "c", "a)(b", "a+)(b",
    # Few ways, but long ones; or few in each of many alternatives.
    "(?!" + "a{999}" * 99 + "b)a", "|".join("(?!" + "a{0,99}" + it + ")a" for it in "bcdefghijk"),
    # An alternative that reads a run in vain, and another one than the next takes it.
    r"\s*[\r\n]+| |\s+", r"\s*[\r\n]|\s*[\r\n]+|\s", O200K.partition("|[^")[0],
    O200K.partition("|[^")[0] + r"|a|\p{L}+",
]  # fmt: skip


@pytest.mark.parametrize("pattern", LINEAR)
def test_patterns_of_tokenizers_in_use_are_linear(pattern):
    assert is_linear(pattern)


@pytest.mark.parametrize("pattern", NOT_LINEAR)
def test_patterns_that_go_back_or_are_not_understood_are_not(pattern):
    assert not is_linear(pattern)


@pytest.mark.slow
@pytest.mark.parametrize("pattern", LINEAR)
@pytest.mark.parametrize(
    "text",
    ["a", "A", "aA", " ", " \n", "\n", "é", "中", "1", "!", "'s", "'", "a ", "(", "]", "\u0300"],
)
def test_ten_times_the_text_takes_far_less_than_a_hundred_times_as_long(pattern, text):
    library = tokenizers.Tokenizer(models.WordLevel({"x": 0}, unk_token="x"))
    library.pre_tokenizer = pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated")

    def processor_time(size: int) -> float:
        repeated = (text * size)[:size] + "~"
        start = time.process_time()
        library.encode_batch([repeated])
        return time.process_time() - start

    least = min(processor_time(3_000) for _ in range(2))
    assert processor_time(30_000) < 40 * least + 0.05

"""Every format and every family was compared with transformers, and the newest result has figures of each."""

import pytest

from benchmarks.parity import TOKENS, compared
from docs.model_tables import families_table, formats_table, newest_parity
from kernels.weight_format import WeightFormat
from model.checkpoint.formats.table import FORMATS
from model.families.table import FAMILIES
from tests.marks import slow_except
from tests.model.checkpoint.format_samples import SAMPLES
from tests.model.checkpoint.hf_checkpoints import CASES

RESULT = newest_parity()
ROWS = RESULT["rows"]
PAIRS = [(name, sample) for name, samples in SAMPLES.items() for sample in samples]


def test_every_format_has_samples_of_which_the_newest_result_has_figures():
    assert set(SAMPLES) == {row.name for row in FORMATS}
    found = {(row["name"], row["sample"]) for row in ROWS if row["kind"] == "format"}
    assert found == set(PAIRS), "run `python -m benchmarks.parity` and `make docs`"


def test_every_family_has_variants_of_which_the_newest_result_has_figures():
    variants = {
        (case.architecture, name) for name, case in CASES.items() if case.architecture in FAMILIES
    }
    assert {name for name, _ in variants} == set(FAMILIES)
    found = {(row["name"], row["sample"]) for row in ROWS if row["kind"] == "family"}
    assert found == variants, "run `python -m benchmarks.parity` and `make docs`"


def test_all_tokens_of_the_newest_result_are_equal():
    assert [row for row in ROWS if row["tokens"] < TOKENS or row["difference"] > 1e-4] == []
    assert RESULT["tokens"] == TOKENS == 120


@pytest.mark.parametrize("pair", slow_except(PAIRS[:2], PAIRS))
def test_a_sample_continues_a_prompt_as_transformers_does(pair, tmp_path):
    name, sample = pair
    folder, exact = SAMPLES[name][sample](tmp_path)

    found = compared(folder, exact, 30)

    assert found.tokens == 30
    assert found.difference < 1e-4
    assert found.held == next(row["held"] for row in ROWS if (row["name"], row["sample"]) == pair)


def test_the_tables_show_the_fewest_tokens_the_largest_difference_and_the_kernels():
    form = {"name": "float8_e4m3fn", "bits": 8, "scales": "row"}
    assert WeightFormat(**form).is_quantized
    formats = [
        {"kind": "format", "name": row.name, "sample": sample, "tokens": tokens, "difference": 0.25, "held": "fp8",
         "format": form}
        for row in FORMATS
        for sample, tokens in (("a", 120), ("b", 7))
    ]  # fmt: skip
    families = [
        {"kind": "family", "name": name, "sample": sample, "tokens": 120, "difference": 1e-6, "held": "none",
         "single_launch": sample == "a", "cpu_library": False}
        for name in FAMILIES
        for sample in "ab"
    ]  # fmt: skip
    result = {
        "rows": [*formats, *families],
        "tokens": 120,
        "versions": {"torch": "2"},
        "file": "cpu-parity-x.json",
    }

    table = formats_table(result).splitlines()

    assert "| a, b | `fp8` | 7 of 120 | 2e-01 | `vector`, `matrix`," in table[2]
    assert len(table) == 2 + len(FORMATS) + 2
    assert "| 2 | 120 of 120 | 1e-06 |" in families_table(result)
    assert "| some variants | no |" in families_table(result)

"""The generated parts of the documents are up to date with the code and the results."""

import json
from pathlib import Path

import pytest

from docs import generate
from docs.generate import (
    benchmarks_page,
    coming_from_page,
    fill,
    flash_attention_page,
    http_page,
    kernels_page,
    models_page,
    plots,
    settings_page,
)
from docs.peer_names import peer_names_page

ROOT = Path(__file__).parents[2]


def test_the_settings_page_is_up_to_date():
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "run `make docs`"


def test_the_page_of_other_servers_names_is_up_to_date():
    assert (ROOT / "docs" / "peer-names.md").read_text() == peer_names_page(), "run `make docs`"


def test_the_kernels_page_shows_the_current_plans_and_the_newest_results():
    assert (ROOT / "docs" / "kernels.md").read_text() == kernels_page(), "run `make docs`"


def test_the_page_of_models_shows_the_newest_comparison_with_transformers():
    assert (ROOT / "docs" / "models.md").read_text() == models_page(), "run `make docs`"


def test_the_newest_speeds_and_perplexities_of_the_same_files_are_shown(tmp_path, monkeypatch):
    results = tmp_path / "benchmarks" / "results"
    results.mkdir(parents=True)

    def write(name, date, isa, rows, **more):
        content = {"date": date, "machine": "a processor", "isa": isa, "rows": rows, **more}
        (results / f"cpu-{name}.json").write_text(json.dumps(content))

    def speed(contender, value):
        shared = {"model": "smollm2", "weights": "Q4_1", "metric": "decode_1"}
        return {**shared, "contender": contender, "value": value}

    def perplexity(value):
        figures = {"value": value, "llama": 12.0, "worse_percent": 100 * (value / 12 - 1)}
        return {"model": "smollm2", "weights": "Q4_1", "text": "prose", **figures}

    native, files = {"name": "native"}, {"files": "gguf"}
    write(
        "peers-gguf-a",
        "2026-11-02",
        native,
        [speed("engine", 130), speed("llama-bench", 100)],
        **files,
    )
    write("peers-gguf-b", "2026-11-01", native, [speed("engine", 1)], **files)
    write("peers-c", "2026-11-03", native, [speed("engine", 2)])
    write("perplexity-gguf-a", "2026-11-01", "native", [perplexity(13.0)])
    write("perplexity-gguf-b", "2026-11-02", "native", [perplexity(12.03)])
    monkeypatch.setattr(generate, "ROOT", tmp_path)

    speeds, perplexities = generate.files_table(), generate.perplexity_table()

    assert "| smollm2 | Q4_1 | AVX-512 VNNI | 130, 100 (1.30) |  |  |  |" in speeds
    assert speeds.endswith("a processor; `cpu-peers-gguf-a.json`.")
    assert "| smollm2, AVX-512 VNNI | Q4_1 | prose | 12.030 | 12.000 | +0.25 % |" in perplexities
    assert "13.0" not in perplexities


def test_the_http_page_shows_what_becomes_of_other_servers_parameters():
    assert (ROOT / "docs" / "http.md").read_text() == http_page(), "run `make docs`"


def test_the_page_for_users_of_other_servers_is_up_to_date():
    assert (ROOT / "docs" / "coming-from.md").read_text() == coming_from_page(), "run `make docs`"


def test_the_page_on_flash_attention_shows_the_newest_result_of_training():
    page = (ROOT / "docs" / "flash-attention.md").read_text()
    assert page == flash_attention_page(), "run `make docs`"
    for name, plot in plots().items():
        assert (ROOT / "docs" / name).read_text() == plot, "run `make docs`"
        assert f"]({name})" in page


def test_the_benchmarks_page_shows_the_newest_results():
    assert (ROOT / "docs" / "benchmarks.md").read_text() == benchmarks_page(), "run `make docs`"


def test_a_generated_part_replaces_the_text_between_its_markers():
    page = "a\n<!-- x: how -->\nold\n<!-- end -->\nb\n<!-- y: how -->\n<!-- end -->\n"

    assert fill(page, "x", "new\n") == page.replace("old", "new")
    assert fill(fill(page, "y", ""), "y", "new") == fill(page, "y", "new")


def test_a_page_without_the_marker_is_an_error():
    with pytest.raises(ValueError, match="no marker z with an end"):
        fill("text", "z", "new")

"""The generated parts of the documents are up to date with the code and the results."""

from pathlib import Path

import pytest

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

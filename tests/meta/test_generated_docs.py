"""The generated parts of the documents are what the code and the results say."""

from pathlib import Path

import pytest

from docs.generate import fill, kernels_page, readme, settings_page

ROOT = Path(__file__).parents[2]


def test_the_settings_page_lists_every_setting_as_the_code_has_it():
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "run `make docs`"


def test_the_tables_of_the_readme_are_those_of_the_newest_results():
    assert (ROOT / "README.md").read_text() == readme(), "run `make docs`"


def test_the_page_of_the_kernels_shows_todays_plans_and_newest_results():
    assert (ROOT / "docs" / "kernels.md").read_text() == kernels_page(), "run `make docs`"


def test_a_generated_part_replaces_what_stood_between_its_marks():
    page = "a\n<!-- x: how -->\nold\n<!-- end -->\nb\n<!-- y: how -->\n<!-- end -->\n"

    assert fill(page, "x", "new\n") == page.replace("old", "new")
    assert fill(fill(page, "y", ""), "y", "new") == fill(page, "y", "new")


def test_a_page_without_the_mark_is_an_error():
    with pytest.raises(ValueError, match="no marker z with an end"):
        fill("text", "z", "new")

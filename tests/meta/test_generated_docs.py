"""The generated parts of the documents are what the code and the results say."""

from pathlib import Path

from docs.generate import readme, settings_page

ROOT = Path(__file__).parents[2]


def test_the_settings_page_lists_every_setting_as_the_code_has_it():
    assert (ROOT / "docs" / "settings.md").read_text() == settings_page(), "run `make docs`"


def test_the_tables_of_the_readme_are_those_of_the_newest_results():
    assert (ROOT / "README.md").read_text() == readme(), "run `make docs`"

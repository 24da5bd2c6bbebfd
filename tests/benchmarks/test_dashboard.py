"""The pictures of the dashboard: what they show, and that there is one of each row."""

from xml.etree import ElementTree

import pytest

from benchmarks.dashboard import (
    PICTURES,
    Series,
    dashboard_rows,
    draw_row,
    picture_name,
    round_step,
    shown,
    without_comparison,
)
from tests.deploy.monitoring import ROOT

ROWS = dashboard_rows()


def texts(picture):
    """Return the texts of a picture."""
    return [it.text for it in ElementTree.fromstring(picture).iter() if it.tag.endswith("text")]  # noqa: S314 - our own


@pytest.mark.parametrize("row", ROWS)
def test_a_row_has_a_picture_of_its_panels_with_data_that_the_operations_page_shows(row):
    found = texts((PICTURES / picture_name(row)).read_text())

    assert {panel["title"] for panel in ROWS[row]} <= set(found), (
        "run `python -m benchmarks.dashboard`"
    )
    assert "no data" not in found
    assert f"({picture_name(row)})" in (ROOT / "docs" / "operations.md").read_text()


def test_the_pictures_are_small():
    assert sum((PICTURES / picture_name(row)).stat().st_size for row in ROWS) < 300_000


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [
        (0.0123, "s", "12.3 ms"), (2.5, "s", "2.5 s"), (0, "s", "0 s"), (0.25, "percentunit", "25 %"),
        (3 * 2**20, "bytes", "3 MiB"), (12345, "none", "12,345"), (1.5, "reqps", "1.5/s"),
    ],
)  # fmt: skip
def test_values_are_shown_with_their_unit(value, unit, text):
    assert shown(value, unit) == text


@pytest.mark.parametrize(("value", "step"), [(0, 1), (1.3, 2), (2.1, 2.5), (0.3, 0.5), (60, 100)])
def test_axes_have_round_steps(value, step):
    assert round_step(value) == pytest.approx(step)


@pytest.mark.parametrize(
    ("expression", "value"),
    [
        ('up{job="x"} == 0', 'up{job="x"}'),
        ("increase(a[15m]) > 2", "increase(a[15m])"),
        ("a:b > 0.05", "a:b"),
        ("a / b", "a / b"),
    ],
)
def test_a_silent_alert_is_asked_for_what_it_compares(expression, value):
    assert without_comparison(expression) == value


def test_a_panel_without_data_says_so_and_names_are_escaped():
    panel = {
        "type": "timeseries",
        "title": "a < b",
        "gridPos": {"x": 0, "y": 3, "w": 8, "h": 8},
        "fieldConfig": {"defaults": {}},
    }

    assert texts(draw_row([panel], [[]])) == ["a < b", "no data"]
    assert "x & y" in texts(draw_row([panel], [[Series("x & y", {}, [(1, 0.0), (2, 0.0)])]]))

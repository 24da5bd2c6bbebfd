"""The table and the plots of attention for training are made from the newest result."""

from __future__ import annotations

import itertools
import json
from xml.etree import ElementTree

import pytest

from docs.svg_plot import Line, line_plot
from docs.training_attention import memory_plot, newest_result, speed_plot, training_table

SVG = "{http://www.w3.org/2000/svg}"


def row(kernel, length, **entries):
    speeds = {"forward": 500.4, "backward": 300.6, "peak_mib": 259.2}
    return {"kernel": kernel, "head_dim": 128, "length": length, "causal": True} | (
        entries or speeds
    )


def write(folder, name, date, rows):
    content = {"date": date, "machine": "NVIDIA H100", "commit": "abc", "rows": rows}
    (folder / name).write_text(json.dumps(content))


@pytest.fixture
def result(tmp_path):
    rows = [
        row("tessera", 128),
        row("tessera", 131072),
        row("math", 128, forward=9.0, backward=20.0, peak_mib=8768.0),
        row("math", 131072, out_of_memory=True),
        row("cudnn", 128, unsupported="No kernel."),
    ]
    write(tmp_path, "h100-attention-training-b.json", "2026-01-02", rows)
    older = [row("tessera", 128, forward=1.0, backward=1.0, peak_mib=1.0), row("tessera", 512)]
    write(tmp_path, "h100-attention-training-a.json", "2026-01-01", older)
    other = [row("tessera", 128) | {"causal": False}]
    write(tmp_path, "h100-attention-training-c.json", "2026-01-03", other)
    write(tmp_path, "cpu-attention-training-d.json", "2026-01-04", rows)
    return newest_result(tmp_path)


def test_the_newest_result_of_a_gpu_with_causal_rows_is_taken(result, tmp_path):
    assert result["file"] == "h100-attention-training-b.json"
    assert result["files"] == {
        "h100-attention-training-b.json": [128, 131072],
        "h100-attention-training-a.json": [512],
    }
    with pytest.raises(FileNotFoundError, match="no result"):
        newest_result(tmp_path / "none")


def test_the_table_has_a_row_for_each_length_and_says_what_does_not_fit(result):
    lines = training_table(result).splitlines()
    assert "512: `h100-attention-training-a.json`" in lines[1]
    assert "| 512 | 500, 301 |  |  |  | 259 |  |  |  |" in lines
    assert "| 128 | 500, 301 |  |  | 9, 20 | 259 |  |  | 8,768 |" in lines
    assert "| 131,072 | 500, 301 |  |  | does not fit | 259 |  |  | does not fit |" in lines


def test_the_plots_are_images_with_a_line_for_each_contender_that_ran(result):
    speed, memory = (ElementTree.fromstring(plot(result)) for plot in (speed_plot, memory_plot))  # noqa: S314 - our own
    assert len(speed.findall(f"{SVG}polyline")) == 4
    assert len(memory.findall(f"{SVG}polyline")) == 2
    texts = [text.text for text in memory.findall(f"{SVG}text")]
    assert {"Tessera", "standard", "128", "128k", "100", "10,000"} <= set(texts)


def test_labels_do_not_overlap_and_text_is_escaped():
    lines = {f"a<{i}": Line([(1, 5.0), (8, 5.0 + i / 100)], "red") for i in range(4)}
    image = ElementTree.fromstring(line_plot("x & y", lines, x_label="x", y_label="y"))  # noqa: S314 - our own
    heights = sorted(
        float(it.attrib["y"])
        for it in image.findall(f"{SVG}text")
        if (it.text or "").startswith("a<")
    )
    assert all(after - before >= 14 for before, after in itertools.pairwise(heights))


def test_axes_begin_at_zero_or_at_a_power_of_ten():
    line = {"a": Line([(2, 30.0), (4, 950.0)], "red")}
    linear = line_plot("t", line, x_label="x", y_label="y")
    assert [f">{mark}<" in linear for mark in ("0", "200", "1,000")] == [True] * 3
    logarithmic = line_plot("t", line, x_label="x", y_label="y", log_y=True)
    assert [f">{mark}<" in logarithmic for mark in ("0", "10", "1,000")] == [False, True, True]

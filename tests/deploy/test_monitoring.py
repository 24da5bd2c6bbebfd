"""The rules for Prometheus and the dashboard for Grafana agree with the metrics and with the documents."""

import asyncio
import re
import shutil
import subprocess

import httpx
import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from model.text.tokenizer import Tokenizer
from server.engine.link.protocol import EngineReport, EngineState
from server.http.app import create_app
from server.http.metrics.specs import Outcome
from tests.deploy.monitoring import (
    DASHBOARD,
    FOLDER,
    ROOT,
    all_expressions,
    dashboard_expressions,
    rules,
    selectors,
)
from tests.http.conftest import CONFIG
from tests.http.fakes import FakeEngine, save_tokenizer

ALERTS = {rule["alert"]: rule for rule in rules("alerts.yml")}
CASES = yaml.safe_load((FOLDER / "alerts_test.yml").read_text())["tests"]
COMPOSE = yaml.safe_load((ROOT / "deploy/compose.yaml").read_text())
PROMTOOL = shutil.which("promtool")
# Prometheus adds them when it scrapes.
TARGET_LABELS = {"job", "instance"}
VALUES = {"outcome": {it.value for it in Outcome}, "state": {it.value for it in EngineState}}
needs_promtool = pytest.mark.skipif(
    PROMTOOL is None, reason="promtool is not installed (package prometheus)"
)


async def _scrape(folder):
    save_tokenizer(folder)
    engine = FakeEngine()
    engine.others = [EngineReport()]  # some metrics are of services with several engines
    app = create_app(engine, Tokenizer.from_folder(folder), CONFIG)
    async with httpx.AsyncClient(
        transport=httpx.ASGITransport(app), base_url="http://test"
    ) as client:
        await client.post("/generate", json={"inputs": "x"})
        return (await client.get("/metrics")).text


@pytest.fixture(scope="module")
def scraped(tmp_path_factory):
    """The labels of each scraped metric."""
    text = asyncio.run(_scrape(tmp_path_factory.mktemp("tokenizer")))
    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    return {sample.name: set(sample.labels) for sample in samples} | {"up": set()}


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('sum by (job, le) (rate(a_total{x=~"b|c"}[5m]))', [("a_total", [("x", "b|c")])]),
        ("a:b:c > 0.05 or 0 * d", [("a:b:c", []), ("d", [])]),
        ("histogram_quantile(0.5, a) / round(b)", [("a", []), ("b", [])]),
    ],
)
def test_the_metrics_of_an_expression_are_found(expression, expected):
    assert selectors(expression) == expected


def test_every_metric_in_rules_and_dashboard_exists_with_its_labels(scraped):
    recorded = {rule["record"]: None for rule in rules("recording.yml")}
    for expression in all_expressions():
        for name, matchers in selectors(expression):
            assert name in scraped or name in recorded, expression
            labels = {label for label, _ in matchers} - TARGET_LABELS
            assert labels <= scraped.get(name, set()), expression
            for label, pattern in matchers:
                assert label not in VALUES or set(pattern.split("|")) <= VALUES[label], expression


def test_every_recorded_series_is_used():
    used = {name for expression in all_expressions() for name, _ in selectors(expression)}

    assert {rule["record"] for rule in rules("recording.yml")} <= used


def test_every_alert_has_a_case_in_which_it_fires_and_one_in_which_it_is_silent():
    checks = [check for case in CASES for check in case["alert_rule_test"]]

    for is_silent in (True, False):
        tested = {c["alertname"] for c in checks if is_silent is not bool(c["exp_alerts"])}
        assert tested == set(ALERTS)


def test_every_alert_has_its_section_in_the_documents():
    text = (ROOT / "docs/operations.md").read_text()

    assert set(re.findall(r"^### (Tessera\w+)$", text, re.MULTILINE)) == set(ALERTS)
    for name, rule in ALERTS.items():
        paragraph = text.split(f"### {name}\n", 1)[1].split("\n#", 1)[0]
        assert len(paragraph.split()) > 15, "says what to do"
        assert rule["annotations"]["runbook"] == f"docs/operations.md#{name.lower()}"
        assert rule["labels"]["severity"] in ("critical", "warning")


def test_panels_have_unique_ids_and_do_not_overlap():
    cells = set()
    for panel in DASHBOARD["panels"]:
        at = panel["gridPos"]
        rows, columns = range(at["y"], at["y"] + at["h"]), range(at["x"], at["x"] + at["w"])
        covered = {(row, column) for row in rows for column in columns}
        assert not cells & covered, panel["title"]
        cells |= covered
    assert len({panel["id"] for panel in DASHBOARD["panels"]}) == len(DASHBOARD["panels"])
    assert max(column for _, column in cells) < 24


def test_compose_mounts_existing_files_and_grafana_asks_its_prometheus():
    for name in ("prometheus", "grafana"):
        for volume in COMPOSE["services"][name]["volumes"]:
            source = volume.split(":")[0]
            assert source in COMPOSE["volumes"] or (ROOT / "deploy" / source).exists()
    (source,) = yaml.safe_load((ROOT / "deploy/grafana/datasource.yml").read_text())["datasources"]
    assert source["url"] == "http://prometheus:9090"


@pytest.mark.slow
@needs_promtool
@pytest.mark.parametrize(
    "arguments",
    [
        ("check", "config", "prometheus.yml"),
        ("check", "rules", "recording.yml", "alerts.yml"),
        ("test", "rules", "alerts_test.yml"),
    ],
    ids=" ".join,
)
def test_promtool_accepts(arguments):
    done = subprocess.run(
        [PROMTOOL, *arguments], cwd=FOLDER, capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr


@pytest.mark.slow
@needs_promtool
def test_promtool_parses_every_expression_of_the_dashboard(tmp_path):
    recorded = [
        {"record": f"panel_{place}", "expr": expression}
        for place, expression in enumerate(dashboard_expressions())
    ]
    file = tmp_path / "rules.yml"
    file.write_text(yaml.safe_dump({"groups": [{"name": "dashboard", "rules": recorded}]}))

    done = subprocess.run(
        [PROMTOOL, "check", "rules", str(file)], capture_output=True, text=True, check=False
    )

    assert done.returncode == 0, done.stdout + done.stderr

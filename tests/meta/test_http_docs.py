"""docs/http.md describes every route, field, error, metric, label, endpoint and header of the code."""

import inspect
import re
from pathlib import Path

import pytest

from server import errors
from server.engine.core import plan_report
from server.engine.link.protocol import EngineState
from server.http import service_routes
from server.http.app import DIALECTS
from server.http.dialects.tgi import chat_tokenize, replies
from server.http.dialects.tgi.schema import GenerateParameters
from server.http.metrics.specs import SPECS, Outcome
from server.http.metrics.usage import RequestUsage
from server.receipts import record
from tests.meta.test_routes import ROUTES

ROOT = Path(__file__).parents[2]
DOCUMENT = (ROOT / "docs/http.md").read_text()
NAMED = set(re.findall(r"`([^`\n]+)`", DOCUMENT))


@pytest.mark.parametrize("path", ROUTES)
def test_every_route_is_described(path):
    described = path.replace(":path}", "}")
    methods = " ".join(name for name in NAMED if name.endswith(f" {described}"))
    assert all(method in methods for method in ROUTES[path] - {"HEAD"}), path


@pytest.mark.parametrize(
    "model", [GenerateParameters, *(body for dialect in DIALECTS for body in dialect.bodies)]
)
def test_every_request_field_is_described(model):
    assert set(model.model_fields) <= NAMED


def test_every_reply_field_is_described():
    values = [
        value
        for module in (replies, chat_tokenize, plan_report, service_routes, record)
        for value in vars(module).values()
    ]
    records = [
        value
        for value in values
        if hasattr(value, "__struct_fields__") and value.__module__.startswith("server.")
    ]
    fields = {field for record in records for field in record.__struct_fields__}

    assert fields <= NAMED


def test_every_error_is_described_with_its_status():
    leaves = [
        error
        for error in vars(errors).values()
        if inspect.isclass(error) and issubclass(error, errors.TesseraError)
        if "error_type" in vars(error)
    ]
    for error in leaves:
        assert re.search(rf"\| {error.status} \| `{error.error_type}` \|", DOCUMENT), error


def test_every_metric_is_described_by_its_scraped_name():
    suffixes = {"CounterMetricFamily": "_total", "InfoMetricFamily": "_info"}
    names = {spec.name + suffixes.get(spec.kind.__name__, "") for spec in SPECS}

    assert names <= NAMED


@pytest.mark.parametrize("label", [Outcome, EngineState])
def test_every_label_value_is_described(label):
    assert {member.value for member in label} <= NAMED


def test_every_endpoint_label_of_the_request_metrics_is_described():
    assert {endpoint for dialect in DIALECTS for endpoint in dialect.endpoints} <= NAMED


def test_every_header_that_is_sent_is_described():
    source = "".join(file.read_text() for file in (ROOT / "server/http").rglob("*.py"))
    sent = set(re.findall(r'"(x-[a-z-]+|retry-after|allow|cache-control|connection)"', source))

    assert len(sent) >= 14
    assert sent <= NAMED


def test_every_figure_of_a_requests_usage_is_described():
    fields = set(RequestUsage.__struct_fields__)

    assert fields <= NAMED
    assert {f"x-tessera-{field.replace('_', '-')}" for field in fields} <= NAMED

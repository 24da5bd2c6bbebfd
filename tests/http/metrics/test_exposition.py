"""The text of metrics equals that of prometheus_client, in all formats and after all changes."""

import itertools

import pytest
from prometheus_client.core import (
    CounterMetricFamily,
    GaugeMetricFamily,
    HistogramMetricFamily,
    InfoMetricFamily,
)
from prometheus_client.exposition import choose_encoder

from server.engine.core.messages import EngineStats
from server.http.metrics.exposition import Exposition
from server.http.metrics.registry import Metrics
from server.http.metrics.rows import Reading
from server.http.metrics.specs import Outcome, Spec
from tests.http.conftest import CONFIG
from tests.http.fakes import INFO

pytestmark = pytest.mark.anyio

ACCEPTED = (
    "",
    "application/openmetrics-text; version=1.0.0",
    "text/plain; version=1.0.0; escaping=allow-utf-8",
    "application/openmetrics-text; version=1.0.0; escaping=values",
)


class Families:
    def __init__(self, readings):
        self.readings = readings

    def collect(self):
        return [reading.family() for reading in self.readings]


def expected(readings, accept):
    encode, content_type = choose_encoder(accept)
    return encode(Families(readings)), content_type


def buckets(*counts):
    return list(zip(("1.0", "2.0", "+Inf"), counts, strict=True))


@pytest.mark.parametrize("accept", ACCEPTED)
def test_numbers_are_written_as_by_the_library(accept):
    exposition = Exposition()
    numbers = (
        0.0, 1.0, 3, 0.1, 1e-7, 123456.75, 999999.0, 1e6, 1234567.0, 1.75e9, 1e21, -1.5, -2e6,
        float("inf"), float("-inf"), float("nan"),
    )  # fmt: skip
    for number in numbers:
        readings = [
            Reading(Spec("a", GaugeMetricFamily, "A."), {}, [((), number)]),
            Reading(Spec("b", CounterMetricFamily, "B."), {}, [((), abs(number))]),
        ]
        assert exposition.render(readings, accept) == expected(readings, accept)


@pytest.mark.parametrize("accept", ACCEPTED)
def test_labels_are_written_as_by_the_library(accept):
    exposition = Exposition()
    text = '100 %s\\ "x" \n\u2028 #\r'
    common = {"model_name": text}
    for _ in range(2):
        readings = [
            Reading(
                Spec("vllm:a", GaugeMetricFamily, text, ("z", "b")), common, [((text, "1"), 2.0)]
            ),
            Reading(Spec("c", InfoMetricFamily, "C."), {}, [((), {"z": "1", "a": text})]),
            Reading(
                Spec("d", HistogramMetricFamily, "D.", ("phase",)),
                common,
                [(("x",), (buckets(1.0, 2.0, 2.0), 3.5)), (("y",), (buckets(0, 0, 1), 9))],
            ),
            Reading(Spec("e", GaugeMetricFamily, "E."), {}, []),
        ]
        assert exposition.render(readings, accept) == expected(readings, accept)


@pytest.mark.parametrize("accept", ACCEPTED)
def test_samples_may_come_go_and_change_their_labels(accept):
    exposition = Exposition()
    samples = [(("a",), 1.0), (("b",), 2.0), (("c",), 3.0)]
    infos = [{"x": "1"}, {"x": "2"}, {"y": "2"}]
    for count, info in itertools.product((0, 2, 3, 1), infos):
        for chosen in itertools.permutations(samples, count):
            readings = [
                Reading(Spec("a", GaugeMetricFamily, "A.", ("l",)), {}, list(chosen)),
                Reading(Spec("i", InfoMetricFamily, "I."), {}, [((), info)]),
            ]
            assert exposition.render(readings, accept) == expected(readings, accept)


@pytest.mark.parametrize("accept", ACCEPTED)
async def test_the_services_metrics_are_written_as_by_the_library(engine, monkeypatch, accept):
    metrics = Metrics(engine, CONFIG, "1.2.3", ["generate", "tokenize"])
    taken = []
    read = metrics.read
    monkeypatch.setattr(metrics, "read", lambda: taken.append(read()) or taken[-1])

    def check():
        assert metrics.render(accept) == expected(taken[-1], accept)

    engine.info = None
    check()
    engine.info = INFO
    check()
    metrics.count_request("generate", Outcome.LENGTH)
    metrics.ttft.observe(0.02, 3)
    metrics.duration.observe(1e7)
    engine.stats = EngineStats(num_running=2, prompt_tokens=12345678, prefill_seconds=2.5)
    check()
    metrics.count_request("generate", Outcome.LENGTH)
    metrics.count_request("tokenize", Outcome.OK)
    check()


@pytest.mark.parametrize("accept", ["text/plain; version=1.0.0", "application/openmetrics-text"])
def test_made_up_versions_of_a_format_are_not_kept(accept):
    exposition = Exposition()
    readings = [Reading(Spec("a", GaugeMetricFamily, "A."), {}, [((), 1.0)])]

    for patch in range(20):
        made_up = f"application/openmetrics-text; version=1.0.{patch}"
        assert exposition.render(readings, made_up) == expected(readings, made_up)

    assert len(exposition._formats) <= 4
    assert exposition.render(readings, accept) == expected(readings, accept)


async def test_no_two_metrics_have_the_same_name(engine):
    readings = Metrics(engine, CONFIG, "1.2.3", ["generate"]).read()

    names = [reading.metric.name for reading in readings]

    assert len(names) == len(set(names))

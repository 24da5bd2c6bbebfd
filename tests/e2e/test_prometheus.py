"""A real Prometheus that scrapes a real service under load for two minutes has data for all rules and panels."""

import re
import shutil
import time

import pytest

from benchmarks.monitored_service import load, prometheus
from tests.deploy.monitoring import all_expressions

pytestmark = [pytest.mark.e2e, pytest.mark.slow, pytest.mark.timeout(400)]
SECONDS = 120
_THRESHOLD = re.compile(r"\s(?:==|>|<)\s[\d.]+$")


@pytest.mark.skipif(
    shutil.which("prometheus") is None, reason="prometheus is not installed (package prometheus)"
)
def test_every_expression_of_rules_and_dashboard_has_data(start_service):
    # Two engines, because some series are of services with several.
    service = start_service("--device=cpu", "--data-parallel=2", "--kv-cache-tokens=4096")
    service.wait_until_healthy()

    with prometheus(service.url) as server:
        started = time.monotonic()
        while (left := SECONDS - (time.monotonic() - started)) > 0:
            load(service.url, rate=2, seconds=left)
        expressions = [_THRESHOLD.sub("", expression) for expression in all_expressions()]
        without_data = [it for it in expressions if not server.values(it)]
        rules = server.rules()
        (scrapes,) = server.values('count_over_time(up{job="tessera"}[5m])')
        unknown = server.values("tessera_no_such_metric")

    assert scrapes >= SECONDS / 10 - 1
    assert without_data == []
    assert unknown == []
    assert {rule["health"] for rule in rules} == {"ok"}
    assert not [rule["name"] for rule in rules if rule.get("state", "inactive") == "firing"]

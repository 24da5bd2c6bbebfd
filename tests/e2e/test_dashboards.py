"""Dashboards made for vLLM and Text Generation Inference find their series after a request to the real service."""

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.http.metrics.dashboards import TGI_DASHBOARD, VLLM_DASHBOARD, VLLM_OTHERS, resolve

pytestmark = pytest.mark.e2e


def test_every_series_that_a_dashboard_selects_exists(bundled_service):
    body = {"inputs": "def f():", "parameters": {"max_new_tokens": 4}}
    httpx.post(f"{bundled_service.url}/generate", json=body, timeout=60).raise_for_status()

    text = httpx.get(f"{bundled_service.url}/metrics").text

    samples = [s for family in text_string_to_metric_families(text) for s in family.samples]
    selectors = (*VLLM_DASHBOARD, *VLLM_OTHERS, *TGI_DASHBOARD)
    assert [selector for selector in selectors if not resolve(selector, samples)] == []

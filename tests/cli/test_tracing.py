"""The setting for traces: its check, and what it needs to be installed."""

import importlib.util
import subprocess
import sys

import pytest

from server.cli.service_parts import check_tracing
from server.cli.settings import Settings
from server.engine.core.start_checks import StartupError

ENDPOINT = "http://localhost:4318"


def test_without_the_extra_the_error_names_it(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)

    with pytest.raises(StartupError, match=r"--otlp-endpoint .* pip install 'tessera\[otel\]'"):
        check_tracing(Settings(otlp_endpoint=ENDPOINT))
    check_tracing(Settings())


def test_with_the_extra_nothing_is_raised():
    check_tracing(Settings(otlp_endpoint=ENDPOINT))


@pytest.mark.parametrize("value", ["localhost:4318", "grpc://x", "http://", "http://x?y"])
def test_an_endpoint_must_be_an_http_address(value):
    with pytest.raises(ValueError, match="is not the address of a collector"):
        Settings(otlp_endpoint=value)


def test_without_the_setting_opentelemetry_is_not_imported():
    code = (
        "import sys, server.http.app, server.cli.serve; print('opentelemetry.sdk' in sys.modules)"
    )

    result = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True
    )

    assert result.stdout.strip() == "False", result.stderr

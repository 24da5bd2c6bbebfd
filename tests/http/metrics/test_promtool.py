"""Prometheus's own checker on /metrics."""

import asyncio
import shutil
import subprocess

import pytest

pytestmark = [pytest.mark.anyio, pytest.mark.slow]
PROMTOOL = shutil.which("promtool")


@pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed (package prometheus)")
async def test_promtool_finds_nothing_in_the_services_own_metrics(client):
    await client.post("/generate", json={"inputs": "x"})
    text = (await client.get("/metrics")).content

    checked = await asyncio.to_thread(
        subprocess.run, [PROMTOOL, "check", "metrics"], input=text, capture_output=True, check=False
    )

    # 3: names that other servers gave their metrics do not follow Prometheus's style.
    assert checked.returncode in (0, 3), checked.stderr.decode()
    findings = (checked.stdout + checked.stderr).decode().splitlines()
    assert [f for f in findings if not f.startswith(("vllm:", "tgi_"))] == []
    assert not [f for f in findings if "help" in f]

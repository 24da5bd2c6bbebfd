"""The service does what its OpenAPI document says, for bodies that the document allows and for others.

By default a few cases; `OPENAPI_EXAMPLES=50 pytest -m slow tests/e2e/test_openapi.py` runs more than 3,000.
"""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

FOLDER = Path(__file__).parent
EXAMPLES = int(os.environ.get("OPENAPI_EXAMPLES", "10"))
FULL = 50


@pytest.mark.e2e
@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_schemathesis_finds_nothing(start_service, tmp_path):
    # A short context keeps answers short; every completion that a request can ask for is admitted.
    service = start_service("--device=cpu", "--max-model-len=24", "--max-concurrent-requests=4096")
    service.wait_until_healthy()
    # One worker: Hypothesis sets the recursion limit of all threads, which breaks `ast.parse` in another one.
    phases = ["examples", "fuzzing", *(["coverage"] if EXAMPLES >= FULL else [])]

    run = subprocess.run(
        [
            Path(sys.executable).with_name("schemathesis"),
            f"--config-file={FOLDER / 'schemathesis.toml'}",
            "run", f"{service.url}/openapi.json",
            "--checks=all", "--mode=all", f"--phases={','.join(phases)}",
            f"--max-examples={EXAMPLES}", "--workers=1", "--seed=1", "--continue-on-failure",
            "--request-timeout=60", "--suppress-health-check=all",
        ],
        check=False,
        capture_output=True,
        text=True,
        cwd=tmp_path,
        env=os.environ | {"SCHEMATHESIS_HOOKS": str(FOLDER / "schemathesis_hooks.py")},
    )  # fmt: skip

    cases = re.search(r"(\d+) generated", run.stdout)
    assert cases, run.stdout + run.stderr
    assert run.returncode == 0, run.stdout[-20_000:]
    assert int(cases[1]) >= (3_000 if EXAMPLES >= FULL else 100)

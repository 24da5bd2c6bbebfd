"""The GPUs that `tessera warmup --arch` compiles for."""

import pytest

from tests.kernels.triton_interpreter import HAS_TRITON

pytestmark = pytest.mark.skipif(not HAS_TRITON, reason="Triton is not built for this host")


@pytest.mark.parametrize(
    ("name", "compiled"),
    [("h200", ["h200"]), ("sm_90", ["h100", "h200"]), ("sm_89", ["l4", "rtx4090"])],
)
def test_a_compute_capability_is_compiled_for_all_known_gpus_that_have_it(
    tessera, monkeypatch, name, compiled
):
    asked = []
    monkeypatch.setattr(
        "server.cli.warmup.compile_for", lambda config, arch, say: asked.append(arch.key)
    )

    status, _, error = tessera("warmup", "--arch", name)

    assert (status, error) == (0, "")
    assert asked == compiled


def test_the_kernel_that_is_compiled_is_said_on_standard_error(tessera, monkeypatch):
    monkeypatch.setattr("model.progress.LINE_SECONDS", 0.0)
    monkeypatch.setattr(
        "server.cli.warmup.compile_for",
        lambda config, arch, say: say("compiling kernels, 12 of 87 (decode)"),
    )

    status, out, error = tessera("warmup", "--arch", "L40S")

    assert status == 0
    assert error.startswith(
        "tessera warmup: NVIDIA L40S (sm_89): compiling kernels, 12 of 87 (decode), 0 s so far"
    )
    assert "compiling" not in out

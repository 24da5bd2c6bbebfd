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

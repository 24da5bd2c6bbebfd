"""The process of the service of `tessera run`."""

import json

import pytest

from server.cli.run.service import ServiceProcess, _given
from server.cli.settings import Settings


@pytest.mark.parametrize(
    "values",
    [
        {},
        {"model": "org/name", "revision": "v1", "port": 0},
        {"data_parallel": "auto"},
        {"data_parallel": 2, "max_num_seqs": 4, "overlap": False, "kv_cache_gib": 0.5},
        {"api_key": ("a", "b"), "api_key_file": "/x", "cors_allow_origin": ("https://a.example",)},
        {"frontends": None, "max_model_len": None, "log_level": "debug"},
    ],
)
def test_settings_reach_the_process_as_they_are(values):
    settings = Settings(**values)

    assert Settings.model_validate(json.loads(json.dumps(_given(settings)))) == settings


def test_a_service_that_cannot_start_has_no_port_and_a_status(tmp_path, capfd):
    with ServiceProcess(Settings(model=str(tmp_path / "absent"), port=0)) as service:
        assert service.port() is None

    assert service.status == 1
    assert "error: no folder" in capfd.readouterr().err

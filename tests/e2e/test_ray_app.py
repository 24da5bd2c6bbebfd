"""The application for Ray Serve: its arguments, one replica, and the rule for the number of replicas."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray")

from pydantic import ValidationError

from server.engine.link.protocol import EngineState
from server.ray_app import Options, Tessera, build, replicas_for_load

pytestmark = pytest.mark.e2e

SMALL = {"device": "cpu", "kv_cache_tokens": "2048", "access_log": "off"}


def deployment(application):
    return application._bound_deployment


def context(sequences, places=64, current=2):
    metrics = {"sequences": dict(enumerate(sequences)), "places": {0: places}}
    return SimpleNamespace(
        aggregated_metrics=metrics if sequences else {},
        target_num_replicas=current,
        capacity_adjusted_min_replicas=1,
        capacity_adjusted_max_replicas=8,
    )


def test_a_replica_answers_reports_its_load_and_ends_with_its_engine():
    async def use():
        replica = Tessera(SMALL)
        app = await replica.__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            reply = await client.post(
                "/generate", json={"inputs": "def", "parameters": {"max_new_tokens": 3}}
            )
        replica.check_health()
        stats, engine = replica.record_autoscaling_stats(), replica._engine
        await replica.__del__()
        return reply, stats, engine, replica

    reply, stats, engine, replica = asyncio.run(use())

    assert reply.json()["generated_text"]
    assert stats == {"sequences": 0, "places": 64}
    assert engine.state is EngineState.STOPPED
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        replica.check_health()


@pytest.mark.parametrize(
    ("sequences", "replicas"),
    [((0, 0), 1), ((10, 10), 1), ((64, 64), 3), ((64, 200), 6), ((900, 900), 8), ((), 2)],
)
def test_replicas_follow_the_sequences_within_the_bounds(sequences, replicas):
    assert replicas_for_load(context(sequences)) == (replicas, {})


def test_arguments_are_options_of_the_deployment_and_settings_of_the_service():
    one = deployment(build({"gpus": "1", "cpus": "2", "max_num_seqs": "48"}))
    several = deployment(build({"min_replicas": "2", "max_replicas": "5"}))

    assert one.num_replicas == 1
    assert one.ray_actor_options["num_gpus"] == 1
    assert one.init_args == ({"max_num_seqs": "48"},)
    config = several._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"modell": "x"}, "modell"),
        ({"max_num_seqs": "0"}, "max_num_seqs"),
        ({"min_replicas": "0"}, "min_replicas"),
        ({"min_replicas": "3", "max_replicas": "2"}, "max_replicas=2 is less than"),
    ],
)
def test_wrong_arguments_are_named(arguments, message):
    with pytest.raises(ValidationError, match=message):
        build(arguments)


def test_options_have_no_field_that_is_a_setting():
    assert not Options.model_fields.keys() & type(Options().settings).model_fields.keys()

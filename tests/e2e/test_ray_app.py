"""The application for Ray Serve: its arguments, one replica, and the rule for the number of replicas."""

import asyncio
import functools
import signal
import sys
import tempfile
from types import SimpleNamespace

import httpx
import pytest

pytest.importorskip("ray")

import uvicorn
from pydantic import ValidationError
from uvicorn.lifespan.on import LifespanOn

from server.embedding import embedded_service
from server.engine.link.child_process import ChildStartError
from server.engine.link.protocol import EngineState
from server.ray.app import Options, Tessera, build, replicas_for_load
from server.ray.main import cause, end, from_environment, main, parse
from server.ray.router import SEQUENCES, PrefixRequestRouter, check_version

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
        await replica.end()
        return reply, stats, engine, replica

    reply, stats, engine, replica = asyncio.run(use())

    assert reply.json()["generated_text"]
    assert stats == {"sequences": 0, "places": 64}
    assert engine.state is EngineState.STOPPED
    with pytest.raises(RuntimeError, match="the engine has stopped"):
        replica.check_health()


def test_the_engine_and_its_sockets_end_when_ray_stops_the_replica(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    async def use():
        replica = Tessera(SMALL)
        app = await replica.__serve_build_asgi_app__()
        lifespan = LifespanOn(uvicorn.Config(app, lifespan="on"))  # as Ray does
        await lifespan.startup()
        folders = list(tmp_path.iterdir())
        await lifespan.shutdown()
        return folders, replica._engine.state

    folders, state = asyncio.run(use())

    assert len(folders) == 1
    assert not list(tmp_path.iterdir())
    assert state is EngineState.STOPPED


def test_a_replica_whose_engine_cannot_start_leaves_nothing_behind(monkeypatch, tmp_path):
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    broken = functools.partial(
        embedded_service, engine_command=(sys.executable, "-c", "raise OSError")
    )
    monkeypatch.setattr("server.ray.app.embedded_service", broken)

    with pytest.raises(ChildStartError):
        asyncio.run(Tessera(SMALL).__serve_build_asgi_app__())

    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sequences", "replicas"),
    [((0, 0), 1), ((10, 10), 1), ((64, 64), 3), ((64, 200), 6), ((900, 900), 8), ((), 2)],
)
def test_replicas_follow_the_sequences_within_the_bounds(sequences, replicas):
    assert replicas_for_load(context(sequences)) == (replicas, {})


def test_arguments_are_options_of_the_deployment_and_settings_of_the_service():
    one = deployment(build({"gpus": "1", "cpus": "2", "max_num_seqs": "48", "drain_timeout": "90"}))
    limits = {"min_replicas": "2", "max_replicas": "5", "upscale_delay": "5"}
    several = deployment(build(limits))

    assert one.num_replicas == 1
    assert one._deployment_config.graceful_shutdown_timeout_s == 30 + 90
    assert one.ray_actor_options["num_gpus"] == 1
    assert one.init_args == ({"max_num_seqs": "48", "drain_timeout": "90"},)
    config = several._deployment_config.autoscaling_config
    assert (config.min_replicas, config.max_replicas) == (2, 5)
    assert (config.upscale_delay_s, config.downscale_delay_s) == (5, 600)


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


def test_prefix_routing_puts_the_router_before_the_replicas_that_report_their_load():
    application = build({"prefix_routing": "true", "min_replicas": "2"})
    config = deployment(application)._deployment_config.request_router_config

    assert deployment(application._ingress_request_router).name == "tessera-router"
    assert config.get_request_router_class() is not None
    assert build({})._ingress_request_router is None


def test_a_router_starts_before_the_one_that_it_replaces_stops():
    router = deployment(build({"prefix_routing": "true"})._ingress_request_router)
    config = router._deployment_config

    assert config.max_surge_percent == 100
    assert config.graceful_shutdown_timeout_s > config.graceful_shutdown_wait_loop_s >= 10


def test_another_version_of_ray_is_refused():
    with pytest.raises(ValueError, match=r"this is Ray 2\.61\.0"):
        check_version("2.61.0")


def test_a_request_follows_its_prefix_unless_the_replica_is_loaded():
    def replica(name, sequences):
        full = SimpleNamespace(to_full_id_str=lambda: name)
        return SimpleNamespace(replica_id=full, routing_stats={SEQUENCES: sequences})

    async def chosen(router, *arguments, loads=(0, 0, 0)):
        replicas = [replica(f"r{number}", load) for number, load in enumerate(loads)]
        ranks = await router.choose_replicas(replicas, SimpleNamespace(args=list(arguments)))
        return [rank[0].replica_id.to_full_id_str() for rank in ranks]

    async def use():
        router = PrefixRequestRouter.__new__(PrefixRequestRouter)
        router.initialize_state()
        first = await chosen(router, "prompt")
        loads = [100 if name == first[0] else 0 for name in ("r0", "r1", "r2")]
        router.initialize_state()
        second = await chosen(router, "prompt", loads=loads)
        other = await chosen(router, object(), loads=(9, 5, 7))
        return first, second, other, await router.choose_replicas([])

    first, second, other, none = asyncio.run(use())

    assert sorted(first) == ["r0", "r1", "r2"]
    assert second[:2] == first[1:]
    assert other == ["r1", "r2", "r0"]  # by load: there is no prompt
    assert none == []


def test_a_replica_that_drains_completes_what_runs_and_refuses_what_comes():
    request = {"inputs": "def", "parameters": {"max_new_tokens": 64, "ignore_eos": True}}

    async def use():
        replica = Tessera(SMALL | {"drain_delay": 0})
        app = await replica.__serve_build_asgi_app__()
        transport = httpx.ASGITransport(app)
        async with httpx.AsyncClient(transport=transport, base_url="http://replica") as client:
            running = asyncio.create_task(client.post("/generate", json=request))
            while not replica.record_routing_stats()[SEQUENCES]:  # noqa: ASYNC110 - a statistic, not an event
                await asyncio.sleep(0.01)
            draining = asyncio.create_task(replica.drain())
            await asyncio.sleep(0.05)  # past drain_delay; the refusal outlasts the drain
            late = await client.post("/generate", json=request)
            await draining
            whole = await running
        await replica.end()
        return whole, late, replica._engine.state

    whole, late, state = asyncio.run(use())

    assert whole.status_code == 200
    assert late.status_code == 503
    assert late.headers["retry-after"]
    assert state is EngineState.STOPPED


class Replicas:
    """Stands in for Ray's handle.

    Args:
        drained: what each replica's `drain` returns; an exception if the replica was lost; None if it never ends.
    """

    def __init__(self, drained):
        self._drained = drained
        self.calls = []

    def broadcast(self, method):
        self.calls.append(method)

        async def results(timeout_s, return_exceptions):
            if method == "end":
                return [None]
            if self._drained is None:
                async with asyncio.timeout(timeout_s):
                    await asyncio.Event().wait()
            assert return_exceptions
            return self._drained

        return SimpleNamespace(results_async=results)


def test_the_command_ends_the_other_replicas_when_one_was_lost(monkeypatch):
    lost, slow = Replicas([None, RuntimeError("the actor died")]), Replicas(None)
    whole = asyncio.run(end(Replicas([None, None]), 0))

    assert whole == []
    assert asyncio.run(end(lost, 0)) == ["drain: the actor died"]
    monkeypatch.setattr("server.ray.main._END_SECONDS", 0.1)
    assert asyncio.run(end(slow, 0)) == ["drain: a replica did not return within 0.1 s"]
    assert lost.calls == slow.calls == ["drain", "end"]


def test_a_second_signal_does_not_wait_for_what_runs():
    replicas = Replicas(None)

    async def use():
        asyncio.get_running_loop().call_later(0.1, signal.raise_signal, signal.SIGTERM)
        return await end(replicas, 3600)

    assert asyncio.run(use()) == []
    assert replicas.calls == ["drain", "end"]


def test_arguments_of_the_command_are_names_and_values():
    assert parse(["model=bundled", "cpus=1", "chat_template=a=b"]) == {
        "model": "bundled",
        "cpus": "1",
        "chat_template": "a=b",
    }
    with pytest.raises(ValueError, match="'bundled' is not name=value"):
        parse(["bundled"])


def test_texts_of_lists_are_split_as_those_of_flags():
    application = deployment(build({"api_key": "one, two", "device": "CPU"}))

    assert application.init_args == ({"api_key": ["one", "two"], "device": "cpu"},)


def test_an_empty_key_is_refused_and_no_value_is_shown(monkeypatch, capsys):
    monkeypatch.setattr("server.ray.main.run", lambda command: command(lambda: None))
    monkeypatch.setattr(signal, "signal", lambda *_: None)
    for words in (["api_key="], ["api_key=hid den"], ["api_key=hidden", "max_num_seqs=0"]):
        monkeypatch.setattr(sys, "argv", ["main", *words])
        with pytest.raises(SystemExit) as end:
            main()
        assert end.value.code == 2
        error = capsys.readouterr().err
        assert error.startswith("error: ")
        assert error.count("\n") == 1
        assert "hid" not in error


def test_variables_of_the_service_count_and_unknown_ones_are_refused(monkeypatch):
    monkeypatch.setenv("TESSERA_API_KEY", "")
    monkeypatch.setenv("TESSERA_MAX_NUM_SEQS", "3")
    assert from_environment() == {"api_key": "", "max_num_seqs": "3"}

    monkeypatch.setenv("TESSERA_NONSENSE", "1")
    with pytest.raises(ValueError, match="TESSERA_NONSENSE"):
        from_environment()


@pytest.mark.parametrize(
    ("text", "line"),
    [
        (
            "one\nTraceback (most recent call last):\n  File\nserver.x.ModelError: no such model",
            "no such model",
        ),
        ("Version mismatch: 2.59\nmore", "Version mismatch: 2.59"),
        ("", "RuntimeError"),
    ],
)
def test_the_cause_of_a_failed_start_is_one_line(text, line):
    assert cause(RuntimeError(text)) == line

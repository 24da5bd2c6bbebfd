"""Routes requests of Ray Serve's HAProxy to replicas by the prompt's beginning (`server.ray.prefix_routing`).

HAProxy asks `PrefixRouter` for the replica of each request and sends the request there itself: tokens do not pass
through here. Uses private parts of Ray Serve, so that it accepts one version only.
docs/decisions/0033-ray-serve.md has the measurements.
"""

from __future__ import annotations

import logging
import time
from typing import TYPE_CHECKING, Any, Final

import ray
from ray import serve
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import DeploymentUnavailableError
from ray.serve.request_router import PendingRequest, RequestRouter, RunningReplica
from starlette.applications import Starlette
from starlette.responses import JSONResponse
from starlette.routing import Route

from server.ray.prefix_routing import RecentRequests, ranked, routing_key

if TYPE_CHECKING:
    from ray.serve import Application
    from ray.serve.handle import DeploymentHandle
    from starlette.requests import Request
    from starlette.types import ASGIApp

RAY: Final = "2.60."
"""The versions of Ray whose private parts are used here."""
SEQUENCES: Final = "sequences"
"""Name of the load in a replica's `record_routing_stats`."""
_REPORT_SECONDS: Final = 1.0
_LEAVING_SECONDS: Final = 15.0
"""How long a router that was replaced answers: HAProxy learns of the new one within some seconds."""
_log = logging.getLogger("tessera.ray_router")


class PrefixRequestRouter(RequestRouter):  # type: ignore[misc]  # Ray has no types
    """Orders the replicas for a request. Lives in each process that holds a handle of the replicas."""

    def initialize_state(self) -> None:
        """Start without requests."""
        self._recent = RecentRequests(2 * _REPORT_SECONDS)

    async def choose_replicas(
        self,
        candidate_replicas: list[RunningReplica],
        pending_request: PendingRequest | None = None,
    ) -> list[list[RunningReplica]]:
        """Return the replicas, the best first, each as a rank of its own."""
        replicas = {it.replica_id.to_full_id_str(): it for it in candidate_replicas}
        if not replicas:
            return []
        now = time.monotonic()
        self._recent.keep(replicas)
        loads = {
            name: it.routing_stats.get(SEQUENCES, 0) + self._recent.count(name, now)
            for name, it in replicas.items()
        }
        arguments = pending_request.args if pending_request is not None else []
        # Ray's own proxy, which takes over when HAProxy knows no replica, passes a request instead of a key.
        key = arguments[0] if arguments and isinstance(arguments[0], str) else ""
        names = ranked(key, loads)
        self._recent.add(names[0], now)
        return [[replicas[name]] for name in names]


class PrefixRouter:
    """Answers HAProxy's question where a request goes."""

    def __init__(self, replicas: DeploymentHandle) -> None:
        self._replicas = replicas
        self._has_warned = False

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Return the application with the route that HAProxy's script calls."""
        return Starlette(routes=[Route("/internal/route", self.route, methods=["POST"])])

    async def route(self, request: Request) -> JSONResponse:
        """Return the name of the replica, or 503 if there is none."""
        body = await request.body()
        if not body and not self._has_warned:
            self._has_warned = True
            _log.warning(
                "a request came without its body, and is routed by load alone: if it had one, set "
                "RAY_SERVE_INGRESS_REQUEST_ROUTER_FORWARD_BODY=1 before Ray starts"
            )
        try:
            # Without a reservation: HAProxy sends the request, not this handle.
            async with self._replicas.choose_replica(
                routing_key(body), _reserve=False
            ) as selection:
                name = selection._replica.replica_id.to_full_id_str()  # noqa: SLF001 - no public way
        except (RuntimeError, DeploymentUnavailableError) as error:
            return JSONResponse({"detail": str(error)}, status_code=503)
        return JSONResponse({"replica_id": name})


def check_version(version: str = ray.__version__) -> None:
    """Refuse versions of Ray that this was not written for.

    Raises:
        ValueError: it is another version.
    """
    if not version.startswith(RAY):
        raise ValueError(
            f"prefix_routing uses private parts of Ray {RAY}x, and this is Ray {version}"
        )


def router_config() -> RequestRouterConfig:
    """Return the configuration of the deployment whose replicas are chosen."""
    return RequestRouterConfig(
        request_router_class="server.ray.router:PrefixRequestRouter",
        request_routing_stats_period_s=_REPORT_SECONDS,
    )


def with_prefix_routing(application: Application) -> Any:  # noqa: ANN401 - an `Application`
    """Put the router before an application, whose deployment has `router_config`."""
    deployment = serve.deployment(
        name="tessera-router",
        # Ray runs one on each node with a proxy. By default it stops that before the new one has started, and HAProxy
        # answers 503 meanwhile.
        max_surge_percent=100,
        graceful_shutdown_wait_loop_s=_LEAVING_SECONDS,
        graceful_shutdown_timeout_s=2 * _LEAVING_SECONDS,
        ray_actor_options={"num_cpus": 0},
    )(serve.ingress()(PrefixRouter))
    return application._with_ingress_request_router(deployment.bind(application))  # noqa: SLF001 - no public way

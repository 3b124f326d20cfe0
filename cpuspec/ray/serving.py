"""A Ray Serve application: replicas of the server on the machines of a cluster, and an ingress that finds the right one.

The ingress checks a request, reads it whole, and sends it to the replica that has the conversation's earlier turns. A replica runs
the application that `cpuspec serve` runs, so that every protocol is there. A request whose replica dies is sent to another one,
which goes on where the client's stream has ended: the ingress gives a request a nonce, so that every replica answers the same.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any
from uuid import uuid4

from prometheus_client import Metric
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.config import RequestRouterConfig
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.datastructures import MutableHeaders
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Mount, Route
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from cpuspec.engine.llm import LLM
from cpuspec.environment import usable_cores
from cpuspec.metrics import epoch_s, now_s
from cpuspec.ray.relay import Relay
from cpuspec.ray.routing import conversation_key
from cpuspec.server.app import guard, make_app
from cpuspec.server.errors import BusyError, EngineFailedError, RequestError, UnavailableError
from cpuspec.server.gate import NONCE, context_of
from cpuspec.server.model import ServedModel
from cpuspec.server.observe import METRICS_TYPE, metrics_text
from cpuspec.server.replies import json_response
from cpuspec.server.server import Server
from cpuspec.settings import EngineConfig, ServerConfig, SpecConfig

_LOG = logging.getLogger("cpuspec.server")
_ROUTER = "ray.serve.experimental.consistent_hash_router:ConsistentHashRouter"
_MOST_TRIES = 5  # replicas that one request may lose
_RETRY_S = 0.5  # until replicas that were full are asked again
_METRICS_S = 5.0
_SCOPE = ("type", "asgi", "http_version", "method", "scheme", "path", "raw_path", "query_string", "client", "server")


def app(
    model: str,
    *,
    spec: str | SpecConfig | None = None,
    backend: str = "numba",
    settings: EngineConfig | None = None,
    config: ServerConfig | None = None,
    keys: Sequence[str] = (),
    num_cpus: int | None = None,
    num_replicas: int = 1,
    autoscaling: Mapping[str, Any] | None = None,
    num_ingresses: int = 1,
    ingress_resources: Mapping[str, float] | None = None,
) -> serve.Application:
    """An application for `ray.serve.run`, which answers as `cpuspec serve MODEL` does.

    model, spec, backend, settings: as `LLM` has them; each replica loads the model from its own machine's files, fetched if need
    be.
    config, keys: as the server has them; `config.host` is the address that Ray Serve listens on.
    num_cpus: processors, and threads, of a replica; by default `settings.threads`, else the cores of this machine.
    num_replicas: copies of the model. autoscaling: fields of Ray's AutoscalingConfig instead, such as min_replicas and
    max_replicas; by default a replica is added when each has as many requests as it computes at once.
    num_ingresses: processes that take requests and hand them on, at most one on a machine. ingress_resources: what those machines
    have, of Ray's custom resources; by default they may be any.
    """
    settings, config = settings or EngineConfig(), config or ServerConfig()
    num_cpus = num_cpus or settings.threads or usable_cores()
    settings = replace(settings, threads=settings.threads or num_cpus, plain_on_draft_error=True)
    scale = {"target_ongoing_requests": settings.max_sequences, **autoscaling} if autoscaling else None
    ends = {"graceful_shutdown_timeout_s": config.drain_s, "graceful_shutdown_wait_loop_s": 0.2}
    replicas = serve.deployment(
        Replica,
        name="Replica",
        **({"autoscaling_config": scale} if scale else {"num_replicas": num_replicas}),
        ray_actor_options={"num_cpus": num_cpus},
        max_ongoing_requests=2 * settings.max_sequences,
        max_queued_requests=config.max_waiting,
        request_router_config=RequestRouterConfig(request_router_class=_ROUTER),
        **ends,
    )
    ingress = serve.deployment(
        serve.ingress()(Ingress),
        name="Ingress",
        num_replicas=num_ingresses,
        ray_actor_options={"num_cpus": 0, "resources": dict(ingress_resources or {})},
        max_replicas_per_node=1,
        max_ongoing_requests=config.max_connections,
        **ends,
    )
    name = Path(model).name if Path(model).exists() else model
    return ingress.bind(replicas.bind(model, spec, backend, settings, name, config, tuple(keys)), name, config, tuple(keys))


class Replica:
    """One copy of the model with its server, in a process of its own."""

    def __init__(
        self,
        model: str,
        spec: str | SpecConfig | None,
        backend: str,
        settings: EngineConfig,
        name: str,
        config: ServerConfig,
        keys: Sequence[str],
    ) -> None:
        _log_to_serve()
        self._server = Server(name, config, keys)
        self._served = ServedModel(name, LLM(model, spec, backend, settings=settings), config)
        self._server.start(self._served)
        self._app = make_app(self._server)
        self._id = serve.get_replica_context().replica_id.unique_id

    async def answer(self, scope: dict[str, Any], body: bytes) -> AsyncGenerator[list[Message]]:
        """Yield the application's messages in response to a request, those that are there together in one list."""
        messages: asyncio.Queue[Message | None] = asyncio.Queue()
        received: list[Message] = [{"type": "http.request", "body": body, "more_body": False}]
        gone = asyncio.Event()

        async def receive() -> Message:
            if received:
                return received.pop()
            await gone.wait()
            return {"type": "http.disconnect"}

        task = asyncio.create_task(self._app(scope, receive, messages.put))
        task.add_done_callback(lambda _: messages.put_nowait(None))
        try:
            more = True
            while more:
                found = [await messages.get()]
                while not messages.empty():
                    found.append(messages.get_nowait())
                more = None not in found
                if whole := [one for one in found if one is not None]:
                    yield whole
            task.result()
        finally:  # the ingress leaves when its client does
            gone.set()
            task.cancel()
            with suppress(asyncio.CancelledError, Exception):
                await task

    async def metrics(self) -> list[Metric]:
        """The replica's metrics, with its id as a label."""
        await self._served.ask_prefixes()
        families = list(self._served.metrics.registry.collect())
        for family in families:
            family.samples = [one._replace(labels={**one.labels, "replica": self._id}) for one in family.samples]
        return families

    async def check_health(self) -> None:
        """Raise where the engine can answer no more, so that Ray replaces the replica."""
        if not self._served.runner.is_alive:
            raise EngineFailedError("the engine's thread has ended")

    async def __del__(self) -> None:
        await asyncio.to_thread(self._served.close)


class Ingress:
    """Takes requests, and hands them on to replicas."""

    def __init__(self, replicas: DeploymentHandle, name: str, config: ServerConfig, keys: Sequence[str]) -> None:
        _log_to_serve()
        self._replicas = replicas
        self._config = config
        self._server = Server(name, config, keys)
        self._app_name = serve.get_replica_context().app_name

    def __serve_build_asgi_app__(self) -> ASGIApp:
        probes = [Route("/livez", self._alive), Route("/health", self._health), Route("/ready", self._ready)]
        routes = [*probes, Route("/metrics", self._metrics)]
        found = Starlette(routes=[*routes, Mount("/", self._forward)])
        guard(found, self._server)
        found.add_middleware(_AtRoot)
        return found

    async def _alive(self, request: Request) -> Response:
        return json_response({"status": "ok"})

    async def _health(self, request: Request) -> Response:
        if not await self._num_running():
            raise UnavailableError("no replica is running yet; try again later")
        return json_response({"status": "ok"})

    async def _ready(self, request: Request) -> Response:
        running = await self._num_running()
        return json_response({"status": "ready" if running else "loading", "replicas": running}, 200 if running else 503)

    async def _num_running(self) -> int:
        status = await asyncio.to_thread(serve.status)
        return status.applications[self._app_name].deployments["Replica"].replica_states.get("RUNNING", 0)

    async def _metrics(self, request: Request) -> Response:
        found = await self._replicas.broadcast("metrics").results_async(timeout_s=_METRICS_S, return_exceptions=True)
        alive = [families for families in found if isinstance(families, list)]
        return Response(metrics_text(family for families in alive for family in families), media_type=METRICS_TYPE)

    async def _forward(self, scope: Scope, receive: Receive, send: Send) -> None:
        request = Request(scope, receive)
        body, request_id = await request.body(), context_of(request).id
        headers = [(name, value) for name, value in scope["headers"] if name != b"x-request-id"]
        sent = {name: scope[name] for name in _SCOPE if name in scope}
        sent |= {"headers": [*headers, (b"x-request-id", request_id.encode())], NONCE: (uuid4().hex, epoch_s())}
        relay = Relay(send)
        try:
            await self._answer(sent, body, request_id, relay)
        except RequestError as error:
            await relay.break_off(scope["path"], error, request_id)

    async def _answer(self, scope: dict[str, Any], body: bytes, request_id: str, relay: Relay) -> None:
        """Relay the answer of a replica, and where it dies, the rest of that of another one."""
        replicas = self._replicas.options(stream=True, session_id=conversation_key(body))
        num_lost, ends_s = 0, now_s() + self._config.max_request_s
        while num_lost < _MOST_TRIES:
            messages = replicas.answer.remote(scope, body)
            try:
                async with asyncio.timeout(self._config.max_request_s) as limit:
                    async for some in messages:
                        limit.reschedule(None)
                        for message in some:
                            await relay.pass_on(message)
                return
            except (RayActorError, ReplicaUnavailableError) as error:
                if relay.has_ended:
                    return
                _LOG.warning("request %s lost its replica: %s", request_id, str(error).partition("\n")[0])
                relay.begin_again()
                num_lost += 1
            except BackPressureError:
                if not num_lost or now_s() > ends_s:  # what has been taken on waits for room
                    raise BusyError("every replica has as much to do as it takes on; try again later") from None
                await asyncio.sleep(_RETRY_S)
            except TimeoutError:
                raise UnavailableError("no replica could answer in time; try again later") from None
            finally:
                messages.cancel()
        raise EngineFailedError(f"{_MOST_TRIES} replicas have ended while they computed this answer")


class _AtRoot:
    """Runs an application as if Ray Serve had not given it a prefix, and leaves it to Ray to tell the client the request's id."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            scope = {**scope, "path": scope["path"].removeprefix(scope.get("root_path", "")) or "/", "root_path": ""}

        async def send_on(message: Message) -> None:
            if message["type"] == "http.response.start":
                del MutableHeaders(scope=message)["x-request-id"]
            await send(message)

        await self._app(scope, receive, send_on)


def _log_to_serve() -> None:
    """Let the server's log lines go where Ray Serve's go."""
    _LOG.parent = logging.getLogger("ray.serve")
    _LOG.setLevel(logging.INFO)

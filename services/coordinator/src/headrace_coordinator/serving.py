"""Wires the event log, fleet, gRPC and HTTP into one process, and stops them in order."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import gc
import os
import signal
import socket
import time
from collections.abc import AsyncIterator, Iterator
from pathlib import Path
from typing import Any

import uvicorn
from fastapi import FastAPI
from headrace.sessions.v1.sessions_pb2_grpc import add_SessionServiceServicer_to_server
from headrace_schema.references import keep_closed
from headrace_servicekit.descriptors import raise_limit
from headrace_servicekit.http_server import listening_socket, make_server
from headrace_servicekit.http_server import serve as serve_http
from headrace_servicekit.instance_config import make_token, read_token
from headrace_servicekit.lease.clock import boottime
from headrace_servicekit.logs import configure_logging
from headrace_servicekit.memory.allocator import give_freed_memory_back, reuse_freed_memory
from headrace_servicekit.rpc.addresses import advertised_host, is_loopback, split_address
from headrace_servicekit.rpc.doors import DOORS, peer_name
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.metrics import CHECKPOINTS, watch
from headrace_servicekit.rpc.server import GrpcServer
from headrace_servicekit.rpc.tls import CERTIFICATE, KEY, encrypts_all, keys_folder, show_newest, tls_dir
from headrace_servicekit.tracing import (
    TracingMissing,
    check_endpoint,
    is_tracing,
    start_tracing,
    stop_tracing,
)

from headrace_coordinator.access.issuer import Issuer, read_issuer
from headrace_coordinator.access.tokens import Doors
from headrace_coordinator.access.trust import read_trust
from headrace_coordinator.api.http import make_app
from headrace_coordinator.api.http.over_grpc import SERVICE, SessionServicer
from headrace_coordinator.api.http.routes.service import joining_routes
from headrace_coordinator.api.http.tinker.offers import read_models
from headrace_coordinator.app import Coordinator
from headrace_coordinator.autoscaler import parse_bounds
from headrace_coordinator.data.dataset import forget_items
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.grpc_client import GrpcInstanceClient
from headrace_coordinator.fleet.service import FleetServicer
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.projections.spans import TrajectorySpans
from headrace_coordinator.store.base import DamagedStore, Fenced, ForeignStore, StoreAway
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import History
from headrace_coordinator.store.redis_store import RedisStore

CLAIM_RENEWAL_S = 5.0
STORE_PATIENCE_S = 30.0
FLUSH_S = 5.0
COLLECT_AFTER = 20_000
"""New objects between two walks of the cyclic collector."""


class Refusal(Exception):
    """The coordinator will not start, or must stop; one sentence for its operator."""


def _secret(path: Path | None) -> str | None:
    try:
        return read_token(path)
    except ServiceError as error:
        raise Refusal(error.message) from error


@contextlib.contextmanager
def _reading(options: str) -> Iterator[None]:
    """Refuses what is wrong with the value of an option by the option's name."""
    try:
        yield
    except ValueError as error:
        raise Refusal(f"{options}: {error}") from error


def _trace(endpoint: str) -> None:
    try:
        with _reading("--otlp-endpoint (HEADRACE_OTLP_ENDPOINT)"):
            start_tracing(check_endpoint(endpoint), "coordinator", "coordinator")
    except TracingMissing as error:
        raise Refusal(str(error)) from error


def _http_token(arguments: argparse.Namespace) -> str | None:
    """The secret of the HTTP API, made where no file is named; None with --no-token."""
    if arguments.no_token:
        for address in filter(None, (arguments.http, arguments.sessions_grpc)):
            if not is_loopback(split_address(address)[0]):
                raise Refusal(
                    f"--no-token would let everybody who reaches {address} run code here; "
                    "listen on 127.0.0.1, or leave --no-token out"
                )
        return None
    if arguments.http_token_file:
        return _secret(arguments.http_token_file)
    path = arguments.data_dir / "http-token"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        return _secret(make_token(path))
    except OSError as error:
        raise Refusal(f"cannot write {path} ({error.strerror}); set another --data-dir") from error


def _keep_own_closed(arguments: argparse.Namespace, issuer: Issuer | None) -> None:
    """No reference of a spec reads the coordinator's own files."""
    files = (
        arguments.token_file,
        arguments.join_token_file,
        arguments.http_token_file,
        arguments.redis_password_file,
        issuer.config.client_secret_file if issuer else None,
    )
    keep_closed(path for path in (arguments.data_dir, *files, tls_dir(), keys_folder()) if path)


async def serve(arguments: argparse.Namespace) -> None:
    """Serves until SIGTERM; raises `Refusal`."""
    configure_logging(level=arguments.log_level)
    raise_limit()
    reuse_freed_memory()
    http_token = _http_token(arguments)
    with _reading("--autoscale (HEADRACE_AUTOSCALE)"):
        bounds = parse_bounds(arguments.autoscale)
    with _reading("--tinker-models (HEADRACE_TINKER_MODELS)"):
        arguments.tinker_models = read_models(arguments.tinker_models)
    with _reading("--oidc (HEADRACE_OIDC)"):
        issuer = read_issuer(arguments.oidc) if arguments.oidc else None
    with _reading("--trust, --trust-allow (HEADRACE_TRUST, HEADRACE_TRUST_ALLOW)"):
        trust = read_trust(arguments.trust, arguments.trust_allow)
    _keep_own_closed(arguments, issuer)
    _trace(arguments.otlp_endpoint)
    store = RedisStore(arguments.redis, password=_secret(arguments.redis_password_file))
    history = History(arguments.data_dir.resolve() / "runs")
    event_log = EventLog(store, time.time, boottime, history=history)
    await _open(event_log, arguments)
    token = _secret(arguments.token_file)
    fleet = Fleet(
        event_log,
        lambda kind, address, incarnation: GrpcInstanceClient(
            kind, address, incarnation, token, fleet.recorder
        ),
        FleetSettings(lease_ttl=arguments.lease_ttl, heartbeat=arguments.heartbeat),
    )
    coordinator = Coordinator(
        event_log,
        fleet,
        arguments.data_dir.resolve(),
        bounds=bounds,
        cooldown_s=arguments.autoscale_cooldown,
        trust=trust,
    )
    coordinator.scheduler.after_run = give_back_memory
    if is_tracing():
        event_log.observers.append(TrajectorySpans().observe)
    lasting = {
        "event_log": event_log.run,
        "claim": lambda: event_log.keep_claim(CLAIM_RENEWAL_S),
        "sweep": fleet.sweep,
        "schedule": coordinator.scheduler.run,
        "archive": coordinator.archive.run,
    }
    if bounds:
        lasting["autoscale"] = coordinator.autoscaler.run
    await coordinator.vitals.run(
        lasting, lambda: _serve(arguments, coordinator, event_log, (token, http_token, issuer))
    )
    event_log.mark()
    await store.close()
    await asyncio.to_thread(stop_tracing)


async def _serve(
    arguments: argparse.Namespace,
    coordinator: Coordinator,
    event_log: EventLog,
    tokens: tuple[str | None, str | None, Issuer | None],
) -> None:
    """Serves gRPC with the first token, and HTTP with the second and those of the issuer."""
    server = GrpcServer(
        arguments.listen, token=tokens[0], instance="coordinator", reflection=arguments.reflection
    )
    from headrace.coordinator.v1 import fleet_pb2_grpc

    _collect_less()
    server.add_service(
        fleet_pb2_grpc.add_FleetServiceServicer_to_server,
        FleetServicer(
            coordinator.fleet,
            coordinator.instance_changes.answered,
            contained=coordinator.contained,
            host=advertised_host(arguments.listen, ""),
        ),
        "headrace.coordinator.v1.FleetService",
    )
    try:
        coordinator.vitals.grpc_port = int(split_address(await server.start())[1])
    except ServiceError as error:
        raise Refusal(error.message) from error
    try:
        await _serve_http(arguments, coordinator, event_log, *tokens[1:])
    finally:
        await coordinator.stop()
        await server.drain(2.0)
    await _flush(event_log)


def _collect_less() -> None:
    """Runs the cyclic collector seldom: reference counts free messages and tasks, and its walks cost a run 6 %."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(COLLECT_AFTER, 10, 10)


def give_back_memory() -> None:
    """Frees what a run that has ended leaves: its items, the cycles of its tasks (seldom walked), and their pages."""
    forget_items()
    gc.collect()
    give_freed_memory_back()


async def _flush(event_log: EventLog) -> None:
    """Writes the last events, for at most FLUSH_S: a store that refuses them must not keep the process from ending."""
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(FLUSH_S):
            await event_log.flush()


async def _open(event_log: EventLog, arguments: argparse.Namespace) -> None:
    identity = f"coordinator at {arguments.http}"
    marker = arguments.data_dir / "store_id"
    deadline = asyncio.get_running_loop().time() + STORE_PATIENCE_S
    while True:
        try:
            await event_log.open(identity, marker)
            return
        except (Fenced, ForeignStore, DamagedStore) as error:
            raise Refusal(str(error)) from error
        except StoreAway as error:
            if asyncio.get_running_loop().time() > deadline:
                raise Refusal(
                    f"no store at {arguments.redis} for {STORE_PATIENCE_S:.0f} s: {error}"
                ) from error
            await asyncio.sleep(0.2)


async def _serve_http(
    arguments: argparse.Namespace,
    coordinator: Coordinator,
    event_log: EventLog,
    token: str | None,
    issuer: Issuer | None,
) -> None:
    watch({CHECKPOINTS: arguments.data_dir})
    app = make_app(
        coordinator,
        runs_directory=arguments.data_dir / "runs",
        token=token,
        issuer=issuer,
        tinker_models=arguments.tinker_models,
    )
    joining = _secret(arguments.join_token_file)
    if joining and arguments.authority_dir and (own := tls_dir()):
        app.include_router(joining_routes(arguments.authority_dir, own, joining))
    servicer = SessionServicer(app, coordinator, Doors(event_log, token, issuer))
    async with _sessions_grpc(arguments.sessions_grpc, servicer, token):
        await _serve_app(app, arguments.http, event_log)


@contextlib.asynccontextmanager
async def _sessions_grpc(listen: str, servicer: SessionServicer, token: str | None) -> AsyncIterator[None]:
    """Serves sessions to users by gRPC too, where an address is given."""
    if not listen:
        yield
        return
    server = GrpcServer(listen, token=token, instance="sessions", users=servicer.refusal)
    server.add_service(add_SessionServiceServicer_to_server, servicer, SERVICE.full_name)
    try:
        await server.start()
    except ServiceError as error:
        raise Refusal(f"--sessions-grpc (HEADRACE_SESSIONS_GRPC): {error.message}") from error
    try:
        yield
    finally:
        await server.drain(2.0)


async def _serve_app(app: FastAPI, address: str, event_log: EventLog) -> None:
    host, port = split_address(address)
    folder = tls_dir() if encrypts_all() else None
    http = make_server(
        app,
        timeout_graceful_shutdown=2,
        ssl_certfile=folder / CERTIFICATE if folder else None,
        ssl_keyfile=folder / KEY if folder else None,
    )
    http.config.load()
    if folder and http.config.ssl:
        show_newest(http.config.ssl, folder)
    listening = listen(host, int(port))
    # A TLS handshake that stands still is no connection of the protocol's, which would end it.
    DOORS.watch(listening.getsockname()[1], lambda: _peers(http))
    loop = asyncio.get_running_loop()
    stopping = asyncio.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, stopping.set)
    serving = asyncio.create_task(serve_http(http, listening))
    fenced = event_log.fenced
    assert fenced is not None
    stop = asyncio.create_task(stopping.wait())
    ends: set[asyncio.Future[Any]] = {serving, stop, fenced}
    await asyncio.wait(ends, return_when=asyncio.FIRST_COMPLETED)
    http.should_exit = True
    http.force_exit = True
    await serving
    stop.cancel()
    if fenced.done():
        raise Refusal(fenced.result())


def _peers(http: uvicorn.Server) -> set[str]:
    clients = [getattr(each, "client", None) for each in list(http.server_state.connections)]
    return {peer_name(*client) for client in clients if client}


def listen(host: str, port: int) -> socket.socket:
    """A socket for the HTTP API; raises `Refusal`. A reader of events that was cut off goes on from the last id."""
    try:
        return listening_socket(host, port)
    except OSError as error:
        raise Refusal(
            f"cannot listen on {host}:{port}: {os.strerror(error.errno or 0)}; set another --http"
        ) from error

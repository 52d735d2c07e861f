"""Routes under /tinker/api/v1, as Tinker's client calls them. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Coroutine
from datetime import UTC, datetime
from typing import Any

from fastapi import APIRouter, Request, Response
from fastapi.responses import JSONResponse
from fastapi.routing import APIRoute
from headrace.tinker.v1 import tinker_pb2 as pb
from headrace_schema.problems import explain
from headrace_schema.sessions import (
    CheckpointView,
    Failure,
    ForwardResult,
    OptimStepResult,
    Pending,
    PublishResult,
    Result,
    SampleResult,
)
from headrace_servicekit.http_server import LEFT_STATUS, BodyRefused, CallerLeft, while_connected
from pydantic import BaseModel, ValidationError

from headrace_coordinator.api.http.errors import error_response, invalid
from headrace_coordinator.api.http.requests import BODY_REASONS, CALLS
from headrace_coordinator.api.http.tinker import PREFIX, bodies
from headrace_coordinator.api.http.tinker.names import Path, Promise, parse_path, parse_promise, parse_sampler
from headrace_coordinator.api.http.tinker.service import Tinker
from headrace_coordinator.api.http.tinker.wire import (
    figures,
    forward_output,
    operation,
    parsed,
    sample_output,
)
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.aside import PARSING

READ, CALL, CHANGE = "tinker_read", "tinker_call", "tinker_change"
"""Rows of the table of access."""
HOLD_S = 40.0
"""The client waits for 45 s, and asks again at once."""
PROTOBUF = "application/x-protobuf"
STATUS = {"CONFLICT": 400, "GONE": 410}
"""409 would be sent again for minutes."""


class _Route(APIRoute):
    """A route whose refusals have the status that Tinker's client understands."""

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        handler = super().get_route_handler()

        async def handle(request: Request) -> Response:
            try:
                return await handler(request)
            except Refused as refused:
                status = STATUS.get(refused.reason, 0)
                if refused.reason == "UNAVAILABLE" and request.url.path.endswith("/asample"):
                    status = 429
                return error_response(refused.reason, refused.message, refused.problems, status)
            except CallerLeft:
                return Response(status_code=LEFT_STATUS)

        return handle


async def _body(request: Request) -> bytes:
    try:
        return await CALLS.read(request.scope["headers"], request.receive)
    except BodyRefused as refused:
        raise Refused(BODY_REASONS[refused.status], str(refused)) from refused


async def _read(request: Request, model: type[BaseModel]) -> Any:
    body = await _body(request)
    try:
        return await PARSING.run(lambda: model.model_validate_json(body))
    except ValidationError as error:
        raise invalid(explain(error, model)) from error


def tinker_routes(tinker: Tinker) -> APIRouter:
    """All routes of the protocol; none is part of the API's description."""
    routes = APIRouter(prefix=f"{PREFIX}/api/v1", route_class=_Route, include_in_schema=False)
    _client(routes, tinker)
    _training(routes, tinker)
    _sampling(routes, tinker)
    _records(routes, tinker)

    @routes.api_route("/{path:path}", methods=["GET", "POST", "PUT", "DELETE"], name=READ)
    async def unsupported(path: str) -> Response:
        raise Refused(
            "NOT_FOUND", f"this fleet has no {path[:80]!r} of Tinker's API; docs/tinker.md says what it has"
        )

    return routes


def _client(routes: APIRouter, tinker: Tinker) -> None:
    @routes.post("/client/config", name=READ)
    @routes.post("/client/dynamic_config", name=READ)
    async def config(request: Request) -> dict[str, Any]:
        await _body(request)
        return {}

    @routes.get("/healthz", name=READ)
    async def health() -> dict[str, Any]:
        return {"status": "ok"}

    @routes.post("/telemetry", name=READ)
    async def telemetry(request: Request) -> dict[str, Any]:
        await _body(request)
        return {"status": "accepted"}

    @routes.get("/get_server_capabilities", name=READ)
    async def capabilities() -> dict[str, Any]:
        on_offer = [{"model_name": name, "trainable": True, "sampleable": True} for name in tinker.models]
        return {"supported_models": on_offer}

    @routes.post("/create_session", name=CHANGE)
    async def create_session(request: Request) -> dict[str, Any]:
        await _body(request)
        return {"session_id": await tinker.create_session(), "type": "create_session"}

    @routes.post("/session_heartbeat", name=CALL)
    async def heartbeat(request: Request) -> dict[str, Any]:
        await tinker.heard_of((await _read(request, bodies.OfSession)).session_id)
        return {"type": "session_heartbeat"}

    @routes.post("/sessions/{session}/finish", name=CHANGE)
    async def finish(session: str) -> dict[str, Any]:
        await tinker.finish(session)
        return {}

    @routes.get("/sessions/{session}", name=READ)
    async def session(session: str) -> dict[str, Any]:
        models = [model for model in tinker.listed() if model.startswith(f"{session}:")]
        return {"training_run_ids": models, "sampler_ids": []}


def _training(routes: APIRouter, tinker: Tinker) -> None:
    @routes.post("/create_model", name=CHANGE)
    async def create_model(request: Request) -> dict[str, Any]:
        return _told(await tinker.create_model(await _read(request, bodies.CreateModel)))

    @routes.post("/get_info", name=READ)
    async def get_info(request: Request) -> dict[str, Any]:
        model = (await _read(request, bodies.OfModel)).model_id
        view = tinker.info(model)
        name = tinker.base_model(view.session)
        about = {"model_name": name, "tokenizer_id": name}
        rank = {"is_lora": view.lora_rank > 0, "lora_rank": view.lora_rank}
        return {"type": "get_info", "model_id": model, "model_data": about, "model_name": name, **rank}

    @routes.post("/forward_backward", name=CALL)
    async def forward_backward(request: Request) -> dict[str, Any]:
        body = await _body(request)
        asked = await PARSING.run(lambda: parsed(pb.ForwardBackwardRequest, body))
        width, refused = 1, None
        try:
            made, width = await PARSING.run(lambda: operation(asked))
        except Refused as error:
            refused = error

        def make() -> Any:
            if refused is not None:
                raise refused
            return made

        return _told(await tinker.call(asked.model_id, asked.seq_id, make, "forward_backward", str(width)))

    @routes.post("/optim_step", name=CALL)
    async def optim_step(request: Request) -> dict[str, Any]:
        return _told(await tinker.optim_step(await _read(request, bodies.OptimStep)))

    @routes.post("/save_weights", name=CALL)
    async def save_weights(request: Request) -> dict[str, Any]:
        return _told(await tinker.save(await _read(request, bodies.SaveWeights), "weights"))

    @routes.post("/save_weights_for_sampler", name=CALL)
    async def save_weights_for_sampler(request: Request) -> dict[str, Any]:
        body = await _read(request, bodies.SaveWeights)
        named = body.path is not None
        return _told(await (tinker.save(body, "sampler_weights") if named else tinker.publish(body)))

    @routes.post("/load_weights", name=CHANGE)
    async def load_weights(request: Request) -> dict[str, Any]:
        return _told(await tinker.load(await _read(request, bodies.LoadWeights)))

    @routes.post("/retrieve_future", name=READ)
    async def retrieve_future(request: Request) -> Response:
        asked = (await _read(request, bodies.Retrieve)).request_id
        promise = parse_promise(asked)
        if promise.kind == "create_model":
            return JSONResponse({"type": "create_model", "model_id": promise.model})
        try:
            result = await while_connected(request.receive, tinker.sessions.result(promise.future, HOLD_S))
        except Refused as refused:
            if refused.reason == "NOT_FOUND" and promise.kind == "sample":
                raise Refused("GONE", "the samples were lost with the coordinator; ask again") from refused
            raise
        return _answer(tinker, promise, result)


def _sampling(routes: APIRouter, tinker: Tinker) -> None:
    @routes.post("/create_sampling_session", name=CALL)
    async def create_sampling_session(request: Request) -> dict[str, Any]:
        made = await tinker.create_sampler(await _read(request, bodies.CreateSampler))
        return {"type": "create_sampling_session", "sampling_session_id": made.id}

    @routes.get("/samplers/{sampler}", name=READ)
    async def sampler(sampler: str) -> dict[str, Any]:
        found = parse_sampler(sampler)
        return {"sampler_id": sampler, "base_model": found.base_model, "model_path": found.path}

    @routes.post("/asample", name=CALL)
    async def asample(request: Request) -> dict[str, Any]:
        body = await _read(request, bodies.Sample)
        promise = await tinker.sample(body)
        ids = [f"{promise.model}:{at}" for at in range(body.num_samples)]
        return {"request_id": promise.id, "sample_sequence_ids": ids}


def _records(routes: APIRouter, tinker: Tinker) -> None:
    @routes.get("/training_runs", name=READ)
    async def training_runs(limit: int = 20, offset: int = 0) -> dict[str, Any]:
        found = tinker.listed()
        page = [_training_run(tinker, model) for model in found[offset : offset + limit]]
        return {"training_runs": page, "cursor": _cursor(limit, offset, len(found))}

    @routes.get("/training_runs/{model}", name=READ)
    async def training_run(model: str) -> dict[str, Any]:
        return _training_run(tinker, model)

    @routes.get("/training_runs/{model}/checkpoints", name=READ)
    async def checkpoints(model: str) -> dict[str, Any]:
        return {"checkpoints": [_checkpoint(*each) for each in tinker.checkpoints(model)]}

    @routes.delete("/training_runs/{model}/checkpoints/{kind}/{name}", name=CHANGE)
    async def delete_checkpoint(model: str, kind: str, name: str) -> dict[str, Any]:
        path = Path(model, kind, name)
        tinker.checkpoint(path)
        await tinker.sessions.delete_checkpoint(tinker.own(model), path.saved_as)
        return {}

    @routes.get("/checkpoints", name=READ)
    async def all_checkpoints(limit: int = 100, offset: int = 0) -> dict[str, Any]:
        found = [each for model in tinker.listed() for each in reversed(tinker.checkpoints(model))]
        page = [_checkpoint(*each) for each in found[offset : offset + limit]]
        return {"checkpoints": page, "cursor": _cursor(limit, offset, len(found))}

    @routes.post("/weights_info", name=READ)
    async def weights_info(request: Request) -> dict[str, Any]:
        path = parse_path((await _read(request, bodies.OfPath)).tinker_path)
        tinker.checkpoint(path)
        view = tinker.info(path.model)
        rank = {"is_lora": view.lora_rank > 0, "lora_rank": view.lora_rank or None}
        return {"base_model": tinker.base_model(view.session), **rank}


def _told(promise: Promise) -> dict[str, Any]:
    return {"request_id": promise.id, "model_id": promise.model}


def _answer(tinker: Tinker, promise: Promise, result: Result) -> Response:
    """A result as the client reads it; the two large ones as protobuf."""
    if isinstance(result, ForwardResult):
        return Response(forward_output(result, int(promise.extra)), media_type=PROTOBUF)
    if isinstance(result, SampleResult):
        return Response(sample_output(result, int(promise.extra)), media_type=PROTOBUF)
    if isinstance(result, Pending):
        waits = "paused_capacity" if result.waits_for == "queue" else "active"
        return JSONResponse({"type": "try_again", "request_id": promise.id, "queue_state": waits})
    if isinstance(result, Failure):
        return JSONResponse({"error": result.message, "category": result.category})
    if isinstance(result, OptimStepResult):
        return JSONResponse({"metrics": figures(result.metrics)})
    if isinstance(result, PublishResult):
        sampler = tinker.published(promise, result.version).id
        return JSONResponse({"type": "save_weights_for_sampler", "sampling_session_id": sampler})
    return JSONResponse({"type": promise.kind, "path": promise.extra, "model_id": promise.model})


def _training_run(tinker: Tinker, model: str) -> dict[str, Any]:
    view = tinker.info(model)
    saved = tinker.checkpoints(model)
    last = {kind: _checkpoint(*each) for each in saved for kind in [each[0].kind]}
    return {
        "training_run_id": model,
        "base_model": tinker.base_model(view.session),
        "model_owner": "headrace",
        "is_lora": view.lora_rank > 0,
        "lora_rank": view.lora_rank or None,
        "corrupted": view.state == "FAILED",
        "last_request_time": _time(
            saved[-1][1].created if saved else tinker.reads.run(view.session).created_at
        ),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
    }


def _checkpoint(path: Path, view: CheckpointView) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{path.kind}/{path.name}",
        "checkpoint_type": "training" if path.kind == "weights" else "sampler",
        "time": _time(view.created),
        "tinker_path": str(path),
        "size_bytes": view.size_bytes,
    }


def _time(at: float) -> str:
    return datetime.fromtimestamp(at, UTC).isoformat()


def _cursor(limit: int, offset: int, total: int) -> dict[str, int]:
    return {"offset": offset, "limit": limit, "total_count": total}

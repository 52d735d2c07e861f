"""What Tinker's client asks, as calls of session runs. Knows no HTTP.

Each model is a run of its own. Who samples from a base model, or from a checkpoint of a run that has ended, does so
with a run of its client's session.
"""

from __future__ import annotations

import re
import time
import zlib
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

from headrace_schema.problems import explain
from headrace_schema.sessions import (
    CheckpointView,
    Load,
    Operation,
    OptimStep,
    Publish,
    Refuse,
    Sample,
    Save,
    SessionView,
)
from pydantic import BaseModel, ValidationError

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.http.tinker import bodies
from headrace_coordinator.api.http.tinker.names import (
    LOADED,
    SESSION,
    Path,
    Promise,
    Sampler,
    new_session,
    of_run,
    parse_path,
    parse_sampler,
    run_name,
)
from headrace_coordinator.api.http.tinker.wire import NO_IMAGES, wrong
from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.domain.access import SYSTEM

if TYPE_CHECKING:
    from headrace_coordinator.api.reading.reads import Reads
    from headrace_coordinator.app import Coordinator
    from headrace_coordinator.sessions.service import SessionService

ALPHA = 32.0
"""Of adapters: Tinker's client names none, and says that its service has 32."""
ATTENTION = ["q_proj", "k_proj", "v_proj", "o_proj"]
MLP = ["gate_proj", "up_proj", "down_proj"]
LOST_S = 1800.0
"""A session whose client has not been heard of for so long is closed."""
ENDED = ("SUCCEEDED", "FAILED", "CANCELLED")
RUN = re.compile(rf"(tk-[0-9a-f]{{12}})-(\d+)(?:{LOADED})?-[^-]+")


class Tinker:
    """All clients of Tinker. `models`: specs of the models on offer, by name.

    Whoever sees a model reads it, and its owner alone calls it.
    """

    def __init__(
        self,
        coordinator: Coordinator,
        models: Mapping[str, Mapping[str, Any]],
        now: Callable[[], float] = time.monotonic,
    ) -> None:
        self._coordinator, self.models, self._now = coordinator, models, now
        self._runs: dict[str, str] = {}
        self._heard: dict[str, tuple[float, str]] = {}
        """When a session's client was heard of last, and who that is."""
        self._finished: set[str] = set()

    @property
    def sessions(self) -> SessionService:
        """All session runs."""
        return self._coordinator.sessions

    @property
    def reads(self) -> Reads:
        """What is known of runs."""
        return self._coordinator.reads

    async def create_session(self) -> str:
        """A session for a client."""
        session = new_session()
        await self.heard_of(session)
        return session

    async def heard_of(self, session: str) -> None:
        """Notes that a client lives, and closes the sessions of those that have long been silent. Raises Refused."""
        now, caller = self._now(), CALLER.get().name
        _, whose = self._heard.get(session, (now, caller))
        if SESSION.fullmatch(session) is None or session in self._finished or whose != caller:
            raise Refused("GONE", f"the session {session[:40]!r} has ended; make another ServiceClient")
        self._heard[session] = now, caller
        silent = [each for each, (at, _) in self._heard.items() if now - at > LOST_S]
        before = CALLER.set(SYSTEM)
        try:
            for other in silent:
                await self.finish(other)
        finally:
            CALLER.reset(before)

    async def finish(self, session: str) -> None:
        """Ends a session: its models are saved, and their runs succeed. Those of others stay as they are."""
        caller = CALLER.get()
        if caller is SYSTEM or self._heard.get(session, (0.0, ""))[1] == caller.name:
            self._finished.add(session)
            self._heard.pop(session, None)
        for run in self.sessions.listed():
            own = run.startswith(f"{session}-") and self._owns(run)
            if own and self.sessions.info(run).state not in ENDED:
                await self.sessions.close(run)

    async def create_model(self, body: bodies.CreateModel) -> Promise:
        """Makes a model from a base model."""
        await self.heard_of(body.session_id)
        model = f"{body.session_id}:train:{body.model_seq_id}"
        spec = self._base_spec(body.base_model)
        spec["trainer"] = _trainer(spec.get("trainer", {}), body.lora_config)
        if body.lora_config and body.lora_config.seed is not None:
            spec["seed"] = body.lora_config.seed
        await self.sessions.create({**spec, "name": run_name(model)}, model)
        return Promise("create_model", "", model)

    async def load(self, body: bodies.LoadWeights) -> Promise:
        """Makes a model from a checkpoint, or loads one into a model."""
        path = parse_path(body.path)
        source = self.run_of(path.model)
        load = Load(checkpoint=f"{source}/{path.saved_as}", optimizer=body.optimizer)
        if body.model_id is not None and body.seq_id is not None:
            return await self.call(body.model_id, body.seq_id, lambda: load, "load_weights", body.path)
        if body.session_id is None or body.model_seq_id is None:
            raise wrong(
                "session_id", "it is missing", "give session_id and model_seq_id, or model_id and seq_id"
            )
        await self.heard_of(body.session_id)
        self.checkpoint(path)
        if body.base_model not in (None, self.base_model(source)):
            raise wrong("base_model", f"the checkpoint is of {self.base_model(source)}", "leave it out")
        model = f"{body.session_id}:train:{body.model_seq_id}"
        name = run_name(model) + LOADED
        run = await self.sessions.create({**self.reads.run(source).spec, "name": name}, model)
        return Promise("load_weights", await self.sessions.submit(run, 1, load), model, body.path)

    async def call(
        self, model: str, seq: int, make: Callable[[], Operation], kind: str, extra: str = ""
    ) -> Promise:
        """Accepts call number `seq` of a model. One that is refused uses its number up: the client has counted it."""
        run = self.own(model)
        seq += run.startswith(run_name(model) + LOADED)
        try:
            future = await self.sessions.submit(run, seq, make())
        except (Refused, ValidationError) as error:
            future = await self.sessions.submit(run, seq, _refusal(error))
        return Promise(kind, future, model, extra)

    async def optim_step(self, body: bodies.OptimStep) -> Promise:
        """One step of AdamW."""

        def make() -> OptimStep:
            if body.adam_params is None:
                raise wrong("optimizer_params", "this fleet steps with AdamW alone", "give AdamParams")
            return OptimStep.model_validate(body.adam_params)

        return await self.call(body.model_id, body.seq_id, make, "optim_step")

    async def save(self, body: bodies.SaveWeights, kind: str) -> Promise:
        """Saves a model as `weights` or `sampler_weights`."""
        path = Path(body.model_id, kind, body.path or f"{body.seq_id:06}")
        make = lambda: Save(name=path.saved_as, overwrite=body.overwrite)  # noqa: E731
        request = "save_weights" if kind == "weights" else "save_weights_for_sampler"
        return await self.call(body.model_id, body.seq_id, make, request, str(path))

    async def publish(self, body: bodies.SaveWeights) -> Promise:
        """Makes the weights of the moment ones to sample from; `inflight` are always the newest of those."""
        extra = f"{body.kind}:{body.sampling_session_seq_id or 0}"
        return await self.call(body.model_id, body.seq_id, Publish, "publish", extra)

    def published(self, promise: Promise, version: int) -> Sampler:
        """The sampler that a promise of `publish` was about."""
        kind, _, number = promise.extra.partition(":")
        session, _, _ = promise.model.partition(":")
        base = self.base_model(self.run_of(promise.model))
        weights = "latest" if kind == "inflight" else str(version)
        return Sampler(session, int(number), base, promise.model, weights)

    async def create_sampler(self, body: bodies.CreateSampler) -> Sampler:
        """Something to sample from; refuses what is not there."""
        await self.heard_of(body.session_id)
        session, number = body.session_id, body.sampling_session_seq_id
        if body.model_path:
            path = parse_path(body.model_path)
            self.checkpoint(path)
            base = self.base_model(self.run_of(path.model))
            made = Sampler(session, number, base, path.model, path.saved_as)
        elif body.base_model:
            made = Sampler(session, number, body.base_model)
        else:
            raise wrong("model_path", "it is missing", "give model_path or base_model")
        await self._source(made)
        return made

    async def sample(self, body: bodies.Sample) -> Promise:
        """Asks for samples."""
        sampler = parse_sampler(body.sampling_session_id)
        if any(chunk.type != "encoded_text" for chunk in body.prompt.chunks):
            raise wrong("prompt", NO_IMAGES, "leave them out")
        prompt = [token for chunk in body.prompt.chunks for token in chunk.tokens]
        run, weights = await self._source(sampler)
        params = body.sampling_params
        room = self.sessions.info(run).max_tokens - len(prompt)
        try:
            request = Sample(
                prompt=prompt,
                weights=weights,
                samples=body.num_samples,
                max_tokens=params.max_tokens or max(1, room),
                temperature=params.temperature,
                top_k=max(0, params.top_k),
                top_p=params.top_p,
                seed=params.seed,
                prompt_log_probs=bool(body.prompt_logprobs),
                top_prompt_log_probs=body.topk_prompt_logprobs,
                **_stops(params.stop),
            )
        except ValidationError as error:
            raise _refused(error, Sample) from error
        key = f"{sampler.session}:sample:{sampler.number}:{body.seq_id}"
        future = await self.sessions.sample(run, request, key)
        return Promise("sample", future, key, str(body.prompt_logprobs_last_n or 0))

    async def _source(self, sampler: Sampler) -> tuple[str, str]:
        """(run, weights) of a sampler; a run is made where none is there."""
        if sampler.model:
            source = self.run_of(sampler.model)
            if self._owns(source) and self.sessions.info(source).state not in ENDED:
                return source, sampler.weights
            weights, spec = f"{source}/{sampler.weights}", self.reads.run(source).spec
        else:
            for run in self.sessions.listed():
                own = run.startswith(f"{sampler.session}-") and self._owns(run)
                if (
                    own
                    and self.base_model(run) == sampler.base_model
                    and self.sessions.info(run).state not in ENDED
                ):
                    return run, "base"
            source, weights, spec = sampler.base_model, "base", self._base_spec(sampler.base_model)
        name = f"{sampler.session}-s{zlib.crc32(source.encode()):08x}"
        return await self.sessions.create({**spec, "name": name}, name), weights

    def run_of(self, model: str) -> str:
        """The run of a model that the caller sees. Raises Refused."""
        name = run_name(model)
        run = self._runs.get(model, "")
        if not self.reads.sees(run):
            pattern = re.compile(rf"{name}(?:{LOADED})?-[^-]+")
            found = [run for run in self.sessions.listed() if pattern.fullmatch(run) and self.reads.sees(run)]
            if not found:
                raise Refused("NOT_FOUND", f"there is no model {model[:80]!r}; create_model gives its id")
            run = self._runs[model] = max(found, key=self._owns)
        return run

    def own(self, model: str) -> str:
        """The run of a model of the caller's. Raises Refused."""
        run = self.run_of(model)
        if not self._owns(run):
            raise Refused("FORBIDDEN", f"the model {model} is another user's; this is for its owner")
        return run

    def _owns(self, run: str) -> bool:
        owned = self.reads.owned(run)
        return owned is not None and CALLER.get().owns(owned)

    def listed(self) -> list[str]:
        """All models that the caller sees, newest first."""
        runs = [run for run in reversed(self.sessions.listed()) if self.reads.sees(run)]
        return [f"{each[1]}:train:{each[2]}" for each in map(RUN.fullmatch, runs) if each]

    def info(self, model: str) -> SessionView:
        """The run of a model as it stands."""
        return self.sessions.info(self.run_of(model))

    def base_model(self, run: str) -> str:
        """The name under which the base model of a run is on offer; where it lies, if it is none of them."""
        path = self.sessions.info(run).model
        offered = (name for name, spec in self.models.items() if spec["model"]["path"] == path)
        return next(offered, path)

    def checkpoints(self, model: str) -> list[tuple[Path, CheckpointView]]:
        """What was saved of a model by a client of Tinker, oldest first."""
        found = [(of_run(model, view.name), view) for view in self.sessions.checkpoints(self.run_of(model))]
        return [(path, view) for path, view in found if path is not None]

    def checkpoint(self, path: Path) -> CheckpointView:
        """A checkpoint. Raises Refused."""
        for other, view in self.checkpoints(path.model):
            if other == path:
                return view
        raise Refused("NOT_FOUND", f"there is no checkpoint {path}")

    def _base_spec(self, base_model: str) -> dict[str, Any]:
        spec = self.models.get(base_model, {"model": {"path": base_model}})
        return {**spec, "workflow": "session"}


def _trainer(trainer: Mapping[str, Any], lora: bodies.Lora | None) -> dict[str, Any]:
    """The trainer's section; rank 0, or no adapters at all, means all weights."""
    if lora is None or lora.rank == 0:
        return {**trainer, "lora": None}
    if not (lora.train_attn or lora.train_mlp):
        raise wrong("lora_config", "the head gets no adapter", "set train_attn or train_mlp")
    every = lora.train_attn and lora.train_mlp
    targets: Any = "all-linear" if every else ATTENTION if lora.train_attn else MLP
    return {**trainer, "lora": {"rank": lora.rank, "alpha": ALPHA, "targets": targets}}


def _stops(stop: str | list[int] | list[str] | None) -> dict[str, Any]:
    """What ends a sample; an empty list means nothing does, not even the model's end."""
    if stop is None:
        return {}
    if isinstance(stop, str):
        return {"stop": [stop]}
    texts = [each for each in stop if isinstance(each, str)]
    return {"stop": texts} if texts else {"stop_ids": stop}


def _refused(error: ValidationError, model: type[BaseModel]) -> Refused:
    found = explain(error, model)[0]
    return wrong(found.key, found.problem, found.fix)


def _refusal(error: Refused | ValidationError) -> Refuse:
    """What uses a number up. Raises `error` where the call may be possible later, or elsewhere."""
    if isinstance(error, ValidationError):
        first = error.errors()[0]
        return Refuse(message=f"{'.'.join(map(str, first['loc']))}: {first['msg']}")
    if error.reason != "INVALID":
        raise error
    return Refuse(message=error.message, key=error.problems[0].key if error.problems else "")

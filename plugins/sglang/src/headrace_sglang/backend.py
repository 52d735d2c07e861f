"""SGLang as a backend: calls to a process of its own (`host`), whose children SGLang's schedulers are."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from headrace_modelkit.devices import variables_for
from headrace_rollout.engines.base import Capabilities, EngineConfig, Scope, WeightEntry
from headrace_rollout.engines.hosted.backend import AdapterFile, Backend, Request, Start, Tokens, rows_of
from headrace_rollout.engines.hosted.processes import kill
from headrace_rollout.engines.hosted.relaying import RELAYS
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.samples import Distribution
from headrace_servicekit.process.spawn import descendants
from headrace_servicekit.process.worker import Worker, WorkerGone, exit_description
from headrace_servicekit.process.worker_pipes import JSON_CODEC
from headrace_servicekit.process.worker_pipes import JsonMessage as Message
from typing_extensions import override

from headrace_sglang.arguments import engine_args
from headrace_sglang.options import RELEASED_GRAPHS, WAKE_TAGS, SglangOptions

HOST = "headrace_sglang.host"
_FOREVER_S = 1e9


def capabilities() -> Capabilities:
    """What SGLang offers on this machine.

    A request's seed is read with deterministic kernels alone, of which a CPU and most attention backends have none.
    """
    return Capabilities(
        resume_from_prefix=True,
        inflight_update=True,
        suspend_frees_memory=torch.cuda.is_available(),
        tensor_parallel=True,
        # Its samplers join the two by intersection ("joint").
        top_p_after_others=False,
        # Its penalizer counts what the request itself made, which is not even a resumed prefix.
        penalty_counts_prompt=False,
    )


class SglangBackend(Backend):
    """An engine in a process of its own that holds SGLang."""

    name = "sglang"

    def __init__(self, config: EngineConfig, options: SglangOptions) -> None:
        self.capabilities = capabilities()
        self._config = config
        self._options = options
        self._worker: Worker[Message] | None = None
        self._reading: asyncio.Task[None] | None = None
        self._answers: dict[int, asyncio.Queue[Message]] = {}
        self._numbers = itertools.count(1)
        self._cache_tokens = 0
        self._gone = "the engine does not run"

    @property
    @override
    def alive(self) -> bool:
        return self._worker is not None and not self._gone

    @property
    @override
    def cache_tokens(self) -> int:
        return self._cache_tokens

    @property
    @override
    def pids(self) -> Sequence[int]:
        return descendants([self._worker.process.pid]) if self._worker is not None else []

    @override
    async def start(self, start: Start) -> None:
        try:
            arguments = engine_args(self._config, self._options, start)
        except ValueError as error:
            raise BackendFailed(str(error)) from error
        self._worker, self._gone = await Worker.start(HOST, JSON_CODEC), ""
        self._reading = asyncio.create_task(self._read(self._worker), name="read answers of sglang")
        held = self._cache_tokens = await self._call(
            "start", environment=_variables(start), arguments=arguments
        )
        if held < arguments["context_length"]:
            raise BackendFailed(
                f"its KV cache holds {held} tokens and one sequence may have {arguments['context_length']}; "
                "raise rollout.engine_options.kv_cache_tokens or memory_fraction, or lower model.max_context"
            )

    @override
    async def stop(self) -> None:
        worker, self._worker = self._worker, None
        self._gone = self._gone or "the engine was stopped"
        if worker is None:
            return
        pids = descendants([worker.process.pid])
        if self._reading is not None:
            self._reading.cancel()
        self._tell_all()
        await worker.kill()
        await asyncio.to_thread(kill, pids)

    @override
    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        number, answers = self._ask(
            "generate",
            rid=_rid(request.request_id),
            token_ids=list(request.token_ids),
            sampling=_sampling(request),
            cache_salt=request.cache_salt,
        )
        try:
            while "tokens" in (answer := await answers.get()):
                yield Tokens(*answer["tokens"])
            _result(answer)
            number = 0
        finally:
            if self._answers.pop(number, None) is not None and self.alive:
                self._send("abort", next(self._numbers), rids=[_rid(request.request_id)])

    @override
    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._call("abort", rids=[_rid(each) for each in request_ids])

    @override
    async def score(self, token_ids: Sequence[int], start: int, distribution: Distribution) -> list[float]:
        rid = _rid(f"score-{next(self._numbers)}")
        found: list[float] = await self._call("score", rid=rid, token_ids=list(token_ids), start=start)
        return found

    @override
    async def freeze(self) -> None:
        await self._call("freeze")

    @override
    async def thaw(self) -> None:
        await self._call("thaw")

    @override
    async def begin_install(self, number: int, entries: Sequence[WeightEntry]) -> None:
        await self._call("begin_install")

    @override
    async def update(
        self, path: Path, entries: Sequence[WeightEntry], adapter: AdapterFile | None = None
    ) -> None:
        beside = adapter.as_json() if adapter else None
        await self._call("update", path=str(path), entries=rows_of(entries), adapter=beside)

    @override
    async def finish_install(self, number: int) -> None:
        await self._call("finish_install", number=number)

    @override
    async def reset_cache(self) -> None:
        await self._call("reset_cache")

    @override
    async def sleep(self) -> None:
        await self._call("sleep", tags=[tag for tags in WAKE_TAGS.values() for tag in tags])

    @override
    async def wake(self, scope: Scope) -> None:
        await self._call("wake", tags=WAKE_TAGS[scope])

    @override
    async def use_threads(self, threads: int) -> None:
        """Its schedulers have those of their start."""

    async def _call(self, name: str, /, **arguments: Any) -> Any:
        number, answers = self._ask(name, **arguments)
        try:
            return _result(await answers.get())
        finally:
            self._answers.pop(number, None)

    def _ask(self, name: str, /, **arguments: Any) -> tuple[int, asyncio.Queue[Message]]:
        if not self.alive:
            raise BackendFailed(self._gone)
        number = next(self._numbers)
        self._answers[number] = asyncio.Queue()
        self._send(name, number, **arguments)
        return number, self._answers[number]

    def _send(self, name: str, number: int, /, **arguments: Any) -> None:
        assert self._worker is not None
        self._worker.send({"id": number, "call": name, **arguments})

    async def _read(self, worker: Worker[Message]) -> None:
        try:
            while True:
                answer = await worker.receive(_FOREVER_S)
                for number, *tokens in answer.get("tokens", ()):  # of many requests
                    self._hear(number, {"tokens": tokens})
                if "id" in answer:
                    self._hear(answer["id"], answer)
        except WorkerGone:
            status = await worker.wait_or_kill()
            self._gone = (
                f"its process {exit_description(status)}; see this instance's log for the engine's own words"
            )
            self._tell_all()

    def _hear(self, number: int, answer: Message) -> None:
        if (queue := self._answers.get(number)) is not None:
            queue.put_nowait(answer)

    def _tell_all(self) -> None:
        for queue in self._answers.values():
            queue.put_nowait({"failed": self._gone})


def _result(answer: Message) -> Any:
    if "failed" in answer:
        raise BackendFailed(answer["failed"])
    return answer["result"]


def _rid(request_id: str) -> str:
    # SGLang aborts every request whose id begins with the one given: no id may be another one's beginning.
    return f"{request_id}."


def _sampling(request: Request) -> dict[str, Any]:
    distribution = request.distribution
    return {
        "temperature": distribution.temperature,
        "top_p": distribution.top_p,
        "top_k": distribution.top_k or -1,
        "min_p": distribution.min_p,
        "max_new_tokens": request.max_new_tokens,
        "stop_token_ids": list(request.eos_ids),
        "stream_interval": request.interval,
        "skip_special_tokens": False,
    }


def _variables(start: Start) -> Mapping[str, str]:
    variables = {
        "OMP_NUM_THREADS": str(start.threads),
        "HF_HUB_DISABLE_TELEMETRY": "1",
        "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN": "1",  # by the spare tokens of its arguments
        # When one of its processes ends, SGLang would look into the others for 66 s before it ends too; the run waits.
        "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
        "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
        RELAYS: start.relays,
        **RELEASED_GRAPHS,
    }
    return variables | (variables_for(start.devices) or {"SGLANG_USE_CPU_ENGINE": "1"})

"""vLLM as a backend: its AsyncLLM here, its engine core and workers in processes of their own. Imports vLLM."""

from __future__ import annotations

import asyncio
import multiprocessing
import tempfile
from collections import defaultdict
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import ExitStack, aclosing
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy as np
import torch
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.families.mixtures import expert_shape
from headrace_modelkit.loading import load_architecture
from headrace_schema.sections.policies import OWN
from headrace_servicekit.process.spawn import descendants
from transformers import BatchFeature
from typing_extensions import override
from vllm import SamplingParams
from vllm.distributed.weight_transfer.base import WeightTransferInitRequest, WeightTransferUpdateRequest
from vllm.lora.request import LoRARequest
from vllm.multimodal.inputs import MultiModalKwargsItems, PlaceholderRange
from vllm.sampling_params import RequestOutputKind
from vllm.triton_utils import HAS_TRITON
from vllm.v1.engine.async_llm import AsyncLLM
from vllm.v1.engine.exceptions import EngineDeadError, EngineGenerateError

from headrace_rollout.engines.base import Capabilities, EngineConfig, Lent, Likeliest, Scope, WeightEntry
from headrace_rollout.engines.hosted.backend import (
    AdapterFile,
    Backend,
    Request,
    Start,
    Tokens,
    rows_of,
    version_key,
)
from headrace_rollout.engines.hosted.processes import kill
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.samples import Distribution, Routes
from headrace_rollout.engines.vllm.arguments import (
    SOCKETS,
    LoggedErrors,
    engine_args,
    environment,
    logged_errors,
    one_line,
    start_failed,
    variables_of,
)
from headrace_rollout.engines.vllm.options import VllmOptions

_REFUSALS = (ValueError, RuntimeError, EngineDeadError, EngineGenerateError)
READS = ("qwen2_5_vl", "qwen3_vl")
"""Families whose images and videos it was compared on (`test_engine_images.py`)."""
LOOK_S = 0.5
"""How often a start looks after the hosts that it waits for."""
WAKE_TAGS = {Scope.WEIGHTS: ["weights"], Scope.KV_CACHE: ["kv_cache"]}


def capabilities() -> Capabilities:
    """What vLLM offers on this machine; its seeds are per request, not per position."""
    return Capabilities(
        resume_from_prefix=True,
        inflight_update=True,
        suspend_frees_memory=torch.cuda.is_available(),
        tensor_parallel=True,
        # transformers' processors need torchvision inside of vLLM.
        images=READS if find_spec("torchvision") else (),
        files=("image", "video"),
        lora=True,
        likeliest=True,
        routed_experts=HAS_TRITON,  # Its second model runner alone tells them, which is written in Triton.
    )


class VllmBackend(Backend):
    """An engine whose front end is vLLM's AsyncLLM in this process."""

    name = "vllm"

    def __init__(self, config: EngineConfig, options: VllmOptions) -> None:
        self.capabilities = capabilities()
        self._hosts = config.hosts
        self.ends_between_leases = config.hosts is not None
        self.maps_device_memory = config.hosts is None
        self._config = config
        self._options = options
        self._llm: AsyncLLM | None = None
        self._files = ExitStack()
        """Of its processes, from a start to the stop: their sockets, and what they log."""
        self._logged: LoggedErrors | None = None
        """What its processes say of errors."""
        self._others: set[int] = set()
        self._cores: set[int] | None = set()
        self._scores, self._updating = 0, False
        # Loaded by `load_adapters`: no worker reads the path.
        self._loras = {
            name: LoRARequest(name or OWN, number, "loaded") for number, name in enumerate(config.adapters, 1)
        }
        shape = expert_shape(load_architecture(config.model))
        self._experts = shape.experts if shape is not None else 0

    @property
    @override
    def alive(self) -> bool:
        return self._llm is not None and not self._llm.errored and not self.death

    @property
    @override
    def death(self) -> str:
        if self._hosts is not None and self._hosts.broken:
            return self._hosts.broken
        errored = self._llm is not None and self._llm.errored
        return self._logged.out_of_memory() if errored and self._logged is not None else ""

    @property
    @override
    def cache_tokens(self) -> int:
        return (self._llm.vllm_config.cache_config.kv_cache_size_tokens or 0) if self._llm else 0

    @property
    @override
    def pids(self) -> Sequence[int]:
        cores = _engine_cores()
        return descendants(sorted(cores - self._others if self._cores is None else cores & self._cores))

    @override
    async def start(self, start: Start) -> None:
        self._others, self._cores, self._updating = _engine_cores(), None, False
        meeting = await self._hosts.begin() if self._hosts is not None else None
        self._files.close()
        # What vLLM's processes speak through: those that are killed leave their sockets behind.
        sockets = tempfile.TemporaryDirectory(prefix="headrace-vllm-", ignore_cleanup_errors=True)
        self._sockets = self._files.enter_context(sockets)
        self._logged = logged = self._files.enter_context(logged_errors())
        variables = {**logged.variables, SOCKETS: self._sockets}
        making = asyncio.ensure_future(asyncio.to_thread(self._make, start, variables, meeting))
        try:
            while not (await asyncio.wait([making], timeout=LOOK_S))[0]:
                if self.death:
                    why = self.death
                    await asyncio.to_thread(kill, self.pids)  # it would wait for its ranks for long
                    await asyncio.wait([making])
                    raise BackendFailed(why)
            self._llm = making.result()
        except (ValueError, RuntimeError, OSError) as error:
            raise BackendFailed(start_failed(error, logged.reason())) from error
        self._cores = _engine_cores() - self._others
        await self._obey(self._engine.init_weight_transfer_engine(WeightTransferInitRequest()))

    @override
    async def stop(self) -> None:
        llm, self._llm = self._llm, None
        pids, self._cores = self.pids, set()
        if llm is not None:
            await asyncio.to_thread(llm.shutdown, 5.0)
        await asyncio.to_thread(kill, pids)
        self._logged = None
        self._files.close()
        if self._hosts is not None:
            await self._hosts.end()

    @override
    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        params = _sampling(request.distribution, request.max_new_tokens)
        params.stop_token_ids = list(request.eos_ids)
        params.seed = request.seed if request.distribution.temperature else None
        params.stream_interval = request.interval
        params.flat_logprobs = True  # lists of numbers: objects cost vLLM twice as much
        prompt: dict[str, Any] = {"prompt_token_ids": [*request.token_ids], "cache_salt": request.cache_salt}
        if request.images:
            prompt |= await asyncio.to_thread(self._with_images, request)
        try:
            lora = self._loras.get(request.adapter)
            tokens = self._engine.generate(prompt, params, request.request_id, lora_request=lora)
            async with aclosing(tokens) as outputs:
                async for output in outputs:
                    (made,) = output.outputs
                    if made.token_ids:
                        routes = _routes(made.routed_experts, self._experts)
                        yield Tokens(made.token_ids, made.logprobs.logprobs, routes=routes)
        except _REFUSALS as error:
            raise BackendFailed(one_line(error)) from error

    def _with_images(self, request: Request) -> dict[str, Any]:
        """The request's files as trainers read them, and where they stand: vLLM's own processor reads none again."""
        reader = self._config.codec.images
        assert reader is not None, "checked as the run opened"
        fields = self._engine.renderer.get_mm_processor()._get_mm_fields_config
        items, hashes, places = (defaultdict[str, list[Any]](list) for _ in range(3))
        for image in request.images:
            span = reader.span(request.token_ids, image.start, image.data)
            kind, takes = span.image.kind, torch.zeros(span.image.tokens, dtype=torch.bool)
            takes[torch.from_numpy(span.image.slots)] = True
            own = BatchFeature(dict(span.image.inputs))
            items[kind] += MultiModalKwargsItems.from_hf_inputs(own, fields(own, {}))[kind]
            hashes[kind].append(span.image.digest)
            places[kind].append(PlaceholderRange(span.start, span.image.tokens, takes))
        return {
            "type": "multimodal",
            "mm_kwargs": MultiModalKwargsItems(dict(items)),
            "mm_hashes": dict(hashes),
            "mm_placeholders": dict(places),
        }

    @override
    async def abort(self, request_ids: Sequence[str]) -> None:
        await self._obey(self._engine.abort(list(request_ids)))

    @override
    async def score(self, token_ids: Sequence[int], start: int, distribution: Distribution) -> list[float]:
        """The last id is scored as the one that comes next: a full context has no room behind it."""
        params = _sampling(distribution, 1)
        params.prompt_logprobs, params.logprobs, params.logprob_token_ids = 0, 1, [token_ids[-1]]
        last = await self._read(token_ids, params)
        given = last.prompt_logprobs or []
        found = [given[index][token_ids[index]].logprob for index in range(start, len(token_ids) - 1)]
        return [*found, last.outputs[0].logprobs[0][token_ids[-1]].logprob]

    @override
    async def likeliest(self, token_ids: Sequence[int], start: int, top: int) -> list[Likeliest]:
        params = _sampling(Distribution(), 1)
        params.prompt_logprobs = params.logprobs = top
        last = await self._read(token_ids, params)  # which has the given ids too
        told = [*(last.prompt_logprobs or [])[start:], last.outputs[0].logprobs[0]]
        ranked = (sorted(by_id.items(), key=lambda each: -each[1].logprob)[:top] for by_id in told)
        return [([word for word, _ in best], [each.logprob for _, each in best]) for best in ranked]

    async def _read(self, token_ids: Sequence[int], params: SamplingParams) -> Any:
        """What vLLM says of ids of which the last comes next."""
        self._scores += 1
        prompt, asked = {"prompt_token_ids": list(token_ids[:-1])}, f"score-{self._scores}"
        lora = self._loras.get("")
        try:
            told = [each async for each in self._engine.generate(prompt, params, asked, lora_request=lora)]
        except _REFUSALS as error:
            raise BackendFailed(one_line(error)) from error
        return told[-1]

    @override
    async def freeze(self) -> None:
        await self._obey(self._engine.pause_generation(mode="keep", clear_cache=False))

    @override
    async def thaw(self) -> None:
        await self._obey(self._engine.resume_generation())

    @override
    async def begin_install(self, number: int, entries: Sequence[WeightEntry]) -> None:
        if self._updating:  # one whose tensors came, and were not trusted
            await self._finish_update()
        await self._obey(self._engine.start_weight_update())
        self._updating = True

    @override
    async def update(
        self, path: Path, entries: Sequence[WeightEntry], adapter: AdapterFile | None = None
    ) -> None:
        beside, version = adapter.as_json() if adapter else None, ""
        if self._hosts is not None:
            version = version_key(entries, adapter)
            await self._hosts.hold(version)
        info = {"path": str(path), "entries": rows_of(entries), "adapter": beside, "version": version}
        await self._update(info)

    @override
    async def update_lent(self, lent: Lent, path: Path, entries: Sequence[WeightEntry]) -> None:
        gpu = {"handle": dict(lent.handle), "sums": list(lent.sums)}
        await self._update({"path": str(path), "entries": rows_of(entries), **gpu})

    async def _update(self, info: dict[str, Any]) -> None:
        await self._obey(self._engine.update_weights(WeightTransferUpdateRequest(update_info=info)))
        if problem := await self._problem("headrace_session"):
            await self._finish_update()  # it ends the session, and changes nothing
            raise BackendFailed(problem)

    @override
    async def load_adapters(self, adapters: Mapping[str, AdapterFile]) -> None:
        self._hand_out_all()
        given = [
            {"name": name, "id": self._loras[name].lora_int_id, **each.as_json()}
            for name, each in adapters.items()
        ]
        if problem := await self._problem("headrace_adapters", given):
            raise BackendFailed(problem)

    @override
    async def finish_install(self, number: int) -> None:
        self._hand_out_all()
        await self._finish_update()
        if problem := await self._problem("headrace_session"):
            raise BackendFailed(problem)
        await self._obey(self._engine.update_weight_version(str(number)))

    async def _finish_update(self) -> None:
        self._updating = False
        await self._obey(self._engine.finish_weight_update())

    def _hand_out_all(self) -> None:
        """What no interval has ended yet goes out while the version that made it is the installed one."""
        for state in self._engine.output_processor.request_states.values():
            _hand_out(state)

    async def _problem(self, asked: str, *given: Any) -> str:
        """What any worker answers that broke."""
        workers = await self._obey(self._engine.collective_rpc(asked, args=given))
        return str(next(filter(None, workers), ""))

    @override
    async def reset_cache(self) -> None:
        """What runs is computed again under the new weights."""
        if not await self._obey(self._engine.reset_prefix_cache(reset_running_requests=True)):
            raise BackendFailed("the prefix cache could not be reset: blocks of it are in use")
        if self._config.codec.images is not None:  # what the vision tower made of images that came before
            await self._obey(self._engine.reset_encoder_cache())

    @override
    async def sleep(self) -> None:
        await self._obey(self._engine.sleep(level=2))

    @override
    async def wake(self, scope: Scope) -> None:
        await self._obey(self._engine.wake_up(WAKE_TAGS[scope]))
        if scope is Scope.KV_CACHE:
            await self._obey(self._engine.wake_up(None))

    @override
    async def use_threads(self, threads: int) -> None:
        count = max(1, threads // self._engine.vllm_config.parallel_config.local_world_size)
        await self._obey(self._engine.collective_rpc("headrace_threads", args=(count,)))

    @property
    def _engine(self) -> AsyncLLM:
        if self._llm is None:
            raise BackendFailed("the engine does not run")
        return self._llm

    def _make(
        self, start: Start, variables: Mapping[str, str], meeting: rollout_pb2.FollowResponse | None
    ) -> AsyncLLM:
        arguments = engine_args(self._config, self._options, start, meeting)
        host = meeting.meeting_host if meeting else ""
        own = variables_of(start, self._options, routed_experts=self._config.routed_experts, host=host)
        with environment({**own, **variables}):
            return AsyncLLM.from_engine_args(arguments)

    async def _obey(self, call: Any) -> Any:
        try:
            return await call
        except Exception as error:  # vLLM raises no narrower one for what its engine process refuses
            raise BackendFailed(one_line(error)) from error


def _sampling(distribution: Distribution, count: int) -> SamplingParams:
    return SamplingParams(
        temperature=distribution.temperature,
        top_p=distribution.top_p,
        top_k=distribution.top_k,
        min_p=distribution.min_p,
        repetition_penalty=distribution.repetition_penalty,
        max_tokens=count,
        logprobs=0,
        # What ends an answer is the run's to say, not the model directory's.
        ignore_eos=True,
        detokenize=False,
        output_kind=RequestOutputKind.DELTA,
    )


def _hand_out(state: Any) -> None:
    """Puts the tokens of a request that wait for its interval's end where its reader takes them."""
    new = state.detokenizer.output_token_ids[state.sent_tokens_offset :] if state.sent_tokens_offset else []
    if state.queue is None or not new:
        return
    interval, state.stream_interval = state.stream_interval, 1
    state.queue.put(state.make_request_output(new, None, None, None))
    state.stream_interval, state.sent_tokens_offset = interval, state.detokenizer.num_output_tokens()


def _routes(found: Any, experts: int) -> Routes | None:
    """Of (tokens, layers, chosen) experts; vLLM tells them with a request's end."""
    if found is None or not len(found):
        return None
    rows = np.ascontiguousarray(found, dtype=np.uint8 if experts <= 256 else "<u2")
    return Routes(rows.tobytes(), rows[0].nbytes)


def _engine_cores() -> set[int]:
    """Processes of all engines of this instance; of one that is made anew, or of two in a test."""
    children = multiprocessing.active_children()
    return {
        child.pid for child in children if child.pid and child.name.startswith(("EngineCore", "VllmWorker"))
    }

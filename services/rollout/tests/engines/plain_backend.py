"""A backend over Hugging Face's forward pass in this process: what the adapter itself does is tested with it."""

from __future__ import annotations

import asyncio
import copy
import subprocess
from collections.abc import AsyncGenerator, Mapping, Sequence
from pathlib import Path

import torch
from headrace_modelkit.adapters import merged
from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_rollout.engines.base import Capabilities, Engine, EngineConfig, Scope, WeightEntry
from headrace_rollout.engines.hosted.backend import AdapterFile, Deadlines, Request, Start, Tokens, rows_of
from headrace_rollout.engines.hosted.engine import HostedEngine
from headrace_rollout.engines.hosted.files import read_tensors
from headrace_rollout.engines.hosts import BackendFailed
from headrace_rollout.engines.samples import Distribution
from headrace_rollout.engines.transformers.sampling import RowDistributions, process
from transformers import PreTrainedModel


class PlainBackend:
    """Its process is a child that sleeps: killed like an engine's, it takes the model with it."""

    name = "plain"
    capabilities = Capabilities(
        resume_from_prefix=True, inflight_update=True, penalty_counts_prompt=False, lora=True
    )

    def __init__(self, config: EngineConfig) -> None:
        self._config = config
        self._child: subprocess.Popen[bytes] | None = None
        self._aborted: set[str] = set()
        self._going = asyncio.Event()
        self._going.set()
        self._loaded: dict[str, torch.Tensor] = {}
        self._asleep: set[Scope] = set()
        self.threads = 0
        self.refused: set[int] = set()
        """It takes no prompt that begins with one of these."""
        self.hangs: set[str] = set()
        """Calls that it never answers, until it is started again."""
        self.start_gate = asyncio.Event()
        self.start_gate.set()

    @property
    def alive(self) -> bool:
        return self._child is not None and self._child.poll() is None

    @property
    def pids(self) -> Sequence[int]:
        return [self._child.pid] if self._child is not None else []

    async def start(self, start: Start) -> None:
        await self.start_gate.wait()
        hangs, self.hangs = self.hangs, set()
        if "start" in hangs:
            await asyncio.Event().wait()
        self._model = load_model(self._config.model, weights=False, device="cpu")
        self._adapted: dict[str, PreTrainedModel] = {}
        self._child = subprocess.Popen(["sleep", "1000"])  # noqa: ASYNC220
        self._asleep, self.threads = set(), start.threads

    async def stop(self) -> None:
        if self._child is not None:
            self._child.kill()
            self._child.wait(10)
        self._child = None

    async def generate(self, request: Request) -> AsyncGenerator[Tokens, None]:
        if request.token_ids[0] in self.refused:
            raise BackendFailed("a prompt that it cannot take")
        ids, random = list(request.token_ids), torch.Generator().manual_seed(request.seed)
        for _ in range(request.max_new_tokens):
            self._needs(Scope.WEIGHTS, Scope.KV_CACHE)
            await self._answers("generate")
            await asyncio.sleep(0)
            await self._going.wait()
            if request.request_id in self._aborted or not self.alive:
                return
            scores = self._scores(ids, request.distribution, request.adapter)[-1].log_softmax(-1)
            greedy = request.distribution.temperature == 0
            token = int(scores.argmax() if greedy else torch.multinomial(scores.exp(), 1, generator=random))
            ids.append(token)
            yield Tokens([token], [float(scores[token])])
            if token in request.eos_ids:
                return

    async def abort(self, request_ids: Sequence[str]) -> None:
        self._aborted.update(request_ids)

    async def score(self, token_ids: Sequence[int], start: int, distribution: Distribution) -> list[float]:
        await self._answers("score")
        scores = self._scores(list(token_ids), distribution).log_softmax(-1)
        return [float(scores[index - 1, token_ids[index]]) for index in range(start, len(token_ids))]

    async def freeze(self) -> None:
        self._going.clear()

    async def thaw(self) -> None:
        self._going.set()

    async def begin_install(self, number: int, entries: Sequence[WeightEntry]) -> None:
        if not self.alive:
            raise BackendFailed("the engine does not run")
        await self._answers("begin_install")
        self._needs(Scope.WEIGHTS)
        self._loaded = {}

    async def update(
        self, path: Path, entries: Sequence[WeightEntry], adapter: AdapterFile | None = None
    ) -> None:
        await self._answers("update")
        beside = adapter.as_json() if adapter else None
        try:
            self._loaded = dict(read_tensors(str(path), rows_of(entries), beside))
        except ValueError as error:
            raise BackendFailed(str(error)) from error
        load_weights(self._model, self._loaded)

    async def update_lent(self, lent, path: Path, entries: Sequence[WeightEntry]) -> None:
        assert lent.memory is not None
        await self.update(path, entries)

    async def load_adapters(self, adapters: Mapping[str, AdapterFile]) -> None:
        base = {name: tensor.clone() for name, tensor in state_tensors(self._model)}
        for name, adapter in adapters.items():
            tensors = dict(read_tensors(str(adapter.path), rows_of(adapter.entries), None))
            self._adapted[name] = copy.deepcopy(self._model)
            load_weights(self._adapted[name], dict(merged(base.items(), tensors, adapter.scale)))

    async def finish_install(self, number: int) -> None:
        self._loaded = {}

    async def reset_cache(self) -> None:
        return

    async def sleep(self) -> None:
        await self._answers("sleep")
        self._asleep = {Scope.WEIGHTS, Scope.KV_CACHE}

    async def wake(self, scope: Scope) -> None:
        self._asleep.remove(scope)

    async def use_threads(self, threads: int) -> None:
        self.threads = threads

    async def _answers(self, call: str) -> None:
        if call in self.hangs:
            await asyncio.Event().wait()

    def _needs(self, *memory: Scope) -> None:
        if missing := self._asleep & set(memory):
            raise BackendFailed(f"it sleeps: no memory for {missing}")

    @torch.inference_mode()
    def _scores(self, ids: list[int], distribution: Distribution, adapter: str = "") -> torch.Tensor:
        logits = self._adapted.get(adapter, self._model)(torch.tensor([ids])).logits[0]
        return process(logits, RowDistributions.of([distribution] * len(logits), logits.device))


LIMITS = Deadlines(start_s=60, command_s=30, install_s=60)


def build_plain(config: EngineConfig, limits: Deadlines = LIMITS) -> Engine:
    """The adapter over this backend."""
    return HostedEngine(PlainBackend(config), config, limits)

"""Session runs in memory, for tests of those who speak for a loop: numbers in order, results that can be told apart."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from types import SimpleNamespace
from typing import Any

from headrace_coordinator.access.callers import CALLER
from headrace_coordinator.api.refusal import Refused
from headrace_schema.sessions import (
    CheckpointView,
    Failure,
    Forward,
    ForwardBackward,
    ForwardResult,
    Load,
    LoadResult,
    Operation,
    OptimStep,
    OptimStepResult,
    Pending,
    Publish,
    PublishResult,
    Refuse,
    Result,
    Sample,
    SampledSequence,
    SampleResult,
    Save,
    SaveResult,
    SessionView,
)


class Run:
    """One session run."""

    def __init__(self, id: str, spec: dict[str, Any]) -> None:
        self.id, self.spec, self.state = id, spec, "RUNNING"
        self.step = self.version = self.published = 0
        self.calls: dict[int, Operation] = {}
        self.results: dict[int, Result] = {}
        self.saved: dict[str, CheckpointView] = {}

    def advance(self) -> None:
        """Executes what has no gap below it."""
        while (seq := len(self.results) + 1) in self.calls:
            self.results[seq] = self._result(self.calls[seq])

    def _result(self, call: Operation) -> Result:
        match call:
            case Forward() | ForwardBackward():
                log_probs = [[-target / 8 for target in datum.targets] for datum in call.data]
                loss = -sum(map(sum, log_probs))
                return ForwardResult(kind=call.kind, log_probs=log_probs, metrics={"loss:sum": loss, "s": 1})
            case OptimStep():
                self.step, self.version = self.step + 1, self.version + 1
                return OptimStepResult(version=self.version, step=self.step, metrics={"grad_norm": 0.5})
            case Save():
                if call.name in self.saved and not call.overwrite:
                    return Failure(category="user", message=f"there is a checkpoint {call.name}")
                view = {"name": call.name, "checkpoint": f"{self.id}/{call.name}", "step": self.step}
                about = {"version": self.version, "size_bytes": 8, "created": 1.0 + len(self.saved)}
                self.saved[call.name] = CheckpointView(**view, **about)
                return SaveResult(checkpoint=f"{self.id}/{call.name}", version=self.version)
            case Load():
                self.version += 1
                return LoadResult(version=self.version)
            case Publish():
                self.published = self.version
                return PublishResult(version=self.version)
            case Refuse():
                return Failure(category="user", message=call.message, key=call.key)


class Sessions:
    """`headrace_coordinator.sessions.service.SessionService` without devices; `asked` are the requests for samples."""

    def __init__(self) -> None:
        self.runs: dict[str, Run] = {}
        self.keys: dict[str, str] = {}
        self.asked: dict[str, tuple[str, Sample]] = {}
        self.owners: dict[str, str] = {}
        self.full = False

    def run(self, run: str) -> Any:
        """What the coordinator's reads say of a run, as do the next two."""
        return SimpleNamespace(spec=self.runs[run].spec, created_at=5.0)

    def owned(self, run: str) -> Any:
        """Whose it is."""
        owner = self.owners.get(run, "")
        return SimpleNamespace(owner=owner, team="", visibility="private") if run in self.runs else None

    def sees(self, run: str) -> bool:
        """Whether the caller may read it."""
        return run in self.runs

    async def create(self, spec: Mapping[str, Any], idempotency_key: str = "") -> str:
        if idempotency_key not in self.keys:
            run = f"{spec['name']}-{len(self.runs):06x}"
            self.owners[run] = CALLER.get().name
            self.runs[run], self.keys[idempotency_key] = Run(run, dict(spec)), run
        return self.keys[idempotency_key]

    def info(self, session: str) -> SessionView:
        run = self.runs[session]
        lora = (run.spec.get("trainer") or {}).get("lora") or {"rank": 0}
        about = {"model": run.spec["model"]["path"], "lora_rank": lora["rank"], "max_tokens": 32}
        done = {"step": run.step, "version": run.version, "published": run.published, "next_seq": 1}
        return SessionView(session=session, state=run.state, reason="", **about, **done)

    async def submit(self, session: str, seq: int, operation: Operation) -> str:
        run = self.runs[session]
        if isinstance(operation, OptimStep) and operation.learning_rate > 1:
            raise Refused("INVALID", "learning_rate: more than 1")
        run.calls.setdefault(seq, operation)
        run.advance()
        return f"{session}/{seq}"

    async def sample(self, session: str, request: Sample, key: str = "") -> str:
        if self.full:
            raise Refused("UNAVAILABLE", "too many samples are asked for")
        self.asked.setdefault(key, (session, request))
        return f"samples/{key}"

    async def result(self, future: str, timeout_s: float) -> Result:
        where, _, seq = future.partition("/")
        if where == "samples":
            return self._samples(self.asked[seq][1]) if seq in self.asked else self._unknown(future)
        deadline = asyncio.get_running_loop().time() + min(timeout_s, 1.0)
        while asyncio.get_running_loop().time() < deadline:
            if found := self.runs[where].results.get(int(seq)):
                return found
            await asyncio.sleep(0.01)
        return Pending(waits_for="predecessor")

    def _unknown(self, future: str) -> Result:
        raise Refused("NOT_FOUND", f"there is no future {future}")

    def _samples(self, asked: Sample) -> SampleResult:
        tokens = [asked.prompt[-1] + at for at in range(min(asked.max_tokens, 3))]
        log_probs = [-0.25 * (at + 1) for at in range(len(tokens))]
        one = SampledSequence(tokens=tokens, log_probs=log_probs, stop_reason="length")
        of_prompt = [None, *(-0.5 for _ in asked.prompt[1:])] if asked.prompt_log_probs else []
        width = asked.top_prompt_log_probs
        top = [None, *([(7, -0.5)] * width for _ in asked.prompt[1:])] if width else []
        return SampleResult(
            version=1, sequences=[one] * asked.samples, prompt_log_probs=of_prompt, top_prompt_log_probs=top
        )

    def checkpoints(self, session: str) -> list[CheckpointView]:
        return list(self.runs[session].saved.values())

    async def delete_checkpoint(self, session: str, name: str) -> None:
        del self.runs[session].saved[name]

    async def close(self, session: str) -> None:
        self.runs[session].state = "SUCCEEDED"

    def listed(self) -> list[str]:
        return list(self.runs)

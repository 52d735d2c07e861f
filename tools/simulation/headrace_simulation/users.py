"""The users of a world: they submit runs, change intents at bad moments, and repeat their requests."""

from __future__ import annotations

import asyncio
import contextlib
import random
from collections import Counter
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any, TypeVar

from headrace_coordinator.api.refusal import Refused
from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain import run_states
from headrace_schema.spec import RunSpec

from headrace_simulation.evaluators import Evaluators
from headrace_simulation.judging.judge import Violation
from headrace_simulation.regroupers import Regroupers, regroups
from headrace_simulation.specs import forked, unreadable

if TYPE_CHECKING:
    from headrace_simulation.world import World

T = TypeVar("T")
MOMENTS = {
    "OpenRun": 0.03,
    "Restore": 0.05,
    "CommitStep": 0.03,
    "RecordStep": 0.03,
    "SaveCheckpoint": 0.03,
    "CloseRun": 0.08,
    "LeaveTrainerGroup": 0.2,
}
"""Probability by call that a user changes the run's intent during it."""
CARE_S = 5.0


class Users:
    """All users of one world; `calm` ones submit and wait."""

    def __init__(self, world: World, rng: random.Random, calm: bool) -> None:
        self.counts: Counter[str] = Counter()
        self.keys: dict[str, str] = {}
        """The run that each Idempotency-Key of a submission made."""
        self.doomed: set[str] = set()
        """Runs whose spec cannot succeed."""
        self.origins: dict[str, str] = {}
        """The origin of each forked run."""
        self._world = world
        self._rng = rng
        self._calm = calm
        self._whims_left = 0 if calm else 2 * len(world.specs) + rng.randint(0, 4)
        self._cancels_left = rng.choice([0, 1, 1, 2])
        self.specs: dict[str, RunSpec] = {}
        """The spec of each run."""
        self.evaluators = Evaluators(
            world, self, random.Random(f"{world.seed}/evaluations"), world.evaluations
        )
        self._resume_at: dict[str, float] = {}

    async def live(self) -> None:
        """Until every run that was ever submitted has ended."""
        evaluating = self._world.spawn(self.evaluators.live())
        regrouping = self._world.spawn(self._regroup())
        await asyncio.gather(*(self._come(spec, index) for index, spec in enumerate(self._world.specs)))
        if not self._calm:
            await self._whims()
        while not (evaluating.done() and self._all_ended()):
            await asyncio.sleep(0.25 if self._calm else CARE_S)
            if not self._calm:
                await self._care()
        regrouping.cancel()

    async def _regroup(self) -> None:
        seed = self._world.seed
        if regroups(seed) and not self._calm:
            with contextlib.suppress(asyncio.CancelledError):
                await Regroupers(self._world, self, random.Random(f"{seed}/ranks")).live()

    def _all_ended(self) -> bool:
        coordinator = self._world.coordinator
        if coordinator is None:
            return False
        return all(self._state(run) in run_states.TERMINAL for run in (*self.specs, *self.evaluators.specs))

    def _state(self, run: str) -> str:
        coordinator = self._world.coordinator
        if coordinator is None:
            return ""
        state = coordinator.event_log.state
        if run in state.runs:
            return state.runs[run].state
        return state.ended[run].state if run in state.ended else ""

    # --- requests

    async def ask(self, request: Callable[[Coordinator], Awaitable[T]]) -> T | None:
        """Sends a request until a coordinator has answered it; None when it was refused."""
        while True:
            coordinator, gone = await self._world.serving()
            sent = asyncio.ensure_future(request(coordinator))
            either: set[asyncio.Future[Any]] = {sent, gone}
            await asyncio.wait(either, return_when=asyncio.FIRST_COMPLETED)
            if not sent.done():
                sent.cancel()
                await asyncio.gather(sent, return_exceptions=True)
                continue
            try:
                return sent.result()
            except Refused as refused:
                if refused.reason not in ("CONFLICT", "INVALID", "NOT_FOUND"):
                    raise
                return None

    async def submit(self, spec: RunSpec, key: str, copies: int = 1, patience: int = 1000) -> str:
        """Submits until the spec is accepted, `copies` times at once; empty when it never is.

        Raises `Violation` for two runs of one key.
        """
        for _ in range(patience):
            answers = await asyncio.gather(
                *(
                    self.ask(lambda coordinator: coordinator.submissions.submit(spec, key))
                    for _ in range(copies)
                )
            )
            made = {answer for answer in answers if answer is not None}
            if made:
                run = self.one_of(key, made)
                self.specs[run] = spec
                return run
            await asyncio.sleep(5.0)
        return ""

    def one_of(self, key: str, made: set[str]) -> str:
        """The run that a key made, by the answers to all requests with it. Raises `Violation` for several runs."""
        if len(made | ({self.keys[key]} if key in self.keys else set())) > 1:
            raise Violation(f"idempotency: key {key} made the runs {sorted(made)}")
        [self.keys[key]] = made
        return self.keys[key]

    async def intend(self, run: str, intent: str, copies: int = 1) -> None:
        """Asks for a run to be paused, resumed or cancelled."""
        key = f"{intent}-{run}-{self._rng.random()}"

        def request(coordinator: Coordinator) -> Awaitable[Any]:
            match intent:
                case run_states.RUN:
                    return coordinator.run_changes.resume(run, key)
                case run_states.CANCEL:
                    return coordinator.run_changes.cancel(run, key)
                case _:
                    return coordinator.run_changes.pause(run, intent == run_states.PAUSE_NOW, key)

        self.counts[intent] += 1
        if intent in (run_states.PAUSE, run_states.PAUSE_NOW):
            now = asyncio.get_running_loop().time()
            self._resume_at[run] = now + self._rng.uniform(0.0, 40.0)
        await asyncio.gather(*(self.ask(request) for _ in range(copies)))

    # --- changes of intent

    async def _come(self, spec: RunSpec, index: int) -> None:
        copies = 1
        if not self._calm:
            await asyncio.sleep(self._rng.choice([0.0, self._rng.uniform(0.0, 40.0)]))
            copies = self._rng.choice([1, 1, 1, 4])
        await self.submit(spec, f"submit-{index}", copies)

    async def _whims(self) -> None:
        for _ in range(self._whims_left):
            await asyncio.sleep(self._rng.expovariate(1 / 6.0))
            run = self._rng.choice(list(self.specs))
            whim = self._rng.choice(
                [
                    run_states.PAUSE,
                    run_states.PAUSE,
                    run_states.PAUSE_NOW,
                    run_states.PAUSE_NOW,
                    run_states.RUN,
                    run_states.CANCEL,
                    "storm",
                    "fork",
                    "again",
                ]
            )
            if whim == "fork":
                await self._fork(run)
            elif whim == "again":  # a request whose answer was lost
                key = next(key for key, made in self.keys.items() if made == run)
                await self.submit(self.specs[run], key)
            elif whim == "storm":
                await self._storm(run)
            else:
                await self._change(run, whim)

    async def _change(self, run: str, intent: str) -> None:
        if intent == run_states.CANCEL:
            if not self._cancels_left:
                return
            self._cancels_left -= 1
        await self.intend(run, intent, self._rng.choice([1, 1, 3]))

    async def _storm(self, run: str) -> None:
        """Several changes of intent, milliseconds apart."""
        for _ in range(self._rng.randint(2, 4)):
            last = self._rng.choice(
                [run_states.PAUSE, run_states.PAUSE_NOW, run_states.RUN, run_states.CANCEL]
            )
            self._world.spawn(self._change(run, last))
            await asyncio.sleep(self._rng.choice([0.0, 0.008, 0.1, 1.0]))

    async def _fork(self, run: str) -> None:
        if len(self.specs) > 5:
            return
        world, spec = self._world, self.specs[run]
        directory = f"{world.data_dir}/runs/{run}"
        usable = [c for c in world.disk.listed(directory) if not c.damage]
        lost = self._rng.random() < 0.3
        if not usable and not lost:
            return
        name = f"fork{len(self.specs)}"
        fork = unreadable(spec, name) if lost else forked(spec, run, None, name, self._rng.randint(1, 3))
        made = await self.submit(fork, f"fork-{len(self.specs)}", patience=3)
        if not made:
            return  # Its origin was deleted.
        self.counts["fork"] += 1
        if lost:
            self.doomed.add(made)
        else:
            self.origins[made] = run

    def heard(self, method: str, request: Any) -> None:
        """The coordinator calls an instance: a user may interfere now, also with a run that is about to fail."""
        failing = request.header.run.removeprefix("runs/") if method == "CloseRun" else ""
        if failing in self.doomed and self._rng.random() < 0.5:
            self._world.spawn(self.intend(failing, self._rng.choice(run_states.INTENTS)))
            return
        if self._calm or self._whims_left <= 0 or self._rng.random() >= MOMENTS.get(method, 0.0):
            return
        run = request.header.run.removeprefix("runs/")
        if run in self.specs:
            self._whims_left -= 1
            self._world.spawn(self._interfere(run))

    async def _interfere(self, run: str) -> None:
        await asyncio.sleep(self._rng.choice([0.0, 0.01, 0.1, 0.5]))
        self.counts["moment"] += 1
        await self._storm(run) if self._rng.random() < 0.3 else await self._change(
            run, self._rng.choice([run_states.PAUSE, run_states.PAUSE_NOW, run_states.RUN, run_states.CANCEL])
        )

    async def _care(self) -> None:
        """Resumes runs that have been paused for long."""
        coordinator = self._world.coordinator
        if coordinator is None:
            return
        now = asyncio.get_running_loop().time()
        for run in list(coordinator.event_log.state.active_runs()):
            paused = run.intent in (run_states.PAUSE, run_states.PAUSE_NOW)
            if paused and now >= self._resume_at.setdefault(run.id, now + 20.0):
                del self._resume_at[run.id]
                await self.intend(run.id, run_states.RUN)

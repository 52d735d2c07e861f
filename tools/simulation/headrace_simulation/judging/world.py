"""What must hold of a whole world when its last run has ended, and the world's outcome."""

from __future__ import annotations

import asyncio
from collections import Counter
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states, runs
from headrace_coordinator.domain.totals import Tally
from headrace_coordinator.store.run_files import Item

from headrace_simulation.fleet.disk import StoredCheckpoint, Weights
from headrace_simulation.fleet.trainer import Trainer
from headrace_simulation.judging.evaluation import judge_evaluation
from headrace_simulation.judging.judge import Violation, judge
from headrace_simulation.judging.replay import Pair, Replay

if TYPE_CHECKING:
    from headrace_simulation.world import World


@dataclass
class Outcome:
    """What a world ended with; `state` is that of the run that was submitted first."""

    seed: int
    state: str
    recoveries: int
    trained: int
    dropped: int
    virtual_s: float
    faults: Counter[str] = field(default_factory=Counter)
    requests: Counter[str] = field(default_factory=Counter)
    pairs: Counter[Pair] = field(default_factory=Counter)
    states: dict[str, str] = field(default_factory=dict)
    refilled: int = 0
    """Groups that steps took in place of dropped ones."""
    helped: int = 0
    """Groups whose gradient a helper contributed."""
    borrowed: int = 0
    """Times that a trainer group's device decoded."""
    passed: int = 0
    """Leases of a device that went from one run to another while both were granted it."""
    ahead: int = 0
    """Most steps that were open ahead of the one that was learned."""


class WorldJudge:
    """Compares what a world's log, disk and API say of its runs."""

    def __init__(self, world: World) -> None:
        self._world = world

    async def judge(self) -> Outcome:
        """Every check of an ended world; raises `Violation`."""
        replay = self._world.replay = Replay(self._world.store.log)
        submitted = list(replay.runs)
        if replay.submissions != len(self._world.users.keys):
            raise Violation(f"idempotency: {replay.submissions} runs of {len(self._world.users.keys)} keys")
        first = next(name for name in submitted if name in self._world.users.specs)
        self._world.ended = replay.runs[first]
        self._world.history = await self._history(first)
        counts = {name: await self._judge_run(replay.runs[name]) for name in submitted}
        return Outcome(
            self._world.seed,
            self._world.ended.state,
            sum(run.recoveries for run in replay.runs.values()),
            sum(count.trained for count in counts.values()),
            sum(count.dropped for count in counts.values()),
            asyncio.get_running_loop().time(),
            self._world.faults.counts,
            self._world.users.counts,
            replay.pairs,
            {name: run.state for name, run in replay.runs.items()},
            replay.refilled,
            replay.helped,
            replay.borrowed,
            replay.passed,
            replay.ahead,
        )

    async def _judge_run(self, run: runs.RunState) -> Tally:
        history = await self._history(run.id)
        self._check_end(run)
        if asked := self._world.users.evaluators.specs.get(run.id):
            judge_evaluation(run, asked, history)
            await self._archived(run)
            return Tally()
        tally = judge(run, history, self._weights(run), self._origin(run, history))
        await self._archived(run)
        return tally

    def _check_end(self, run: runs.RunState) -> None:
        """Raises `Violation` unless the run's end follows from its users' intents and its spec."""
        if run.state == run_states.SUCCEEDED and (run.evaluation or run.ledger.step >= run.steps_total):
            return
        if run.state == run_states.CANCELLED and run.intent == run_states.CANCEL:
            return
        if run.state == run_states.FAILED and self._may_fail(run):
            return
        raise Violation(f"liveness: run {run.id} ended {run.state} at step {run.ledger.step}: {run.reason}")

    def _may_fail(self, run: runs.RunState) -> bool:
        if run.reason.endswith("; 2 recoveries without progress (limits.recoveries)"):
            return True
        if run.evaluation is not None:
            directory = f"{self._world.data_dir}/runs/{run.evaluation.checkpoint_run}"
            return "checkpoint: " in run.reason and directory in self._world.disk.harmed
        if "nothing was trained: " in run.reason:
            return not run.totals.tally.trained
        origin = self._world.users.origins.get(run.id)
        harmed = origin is not None and f"{self._world.data_dir}/runs/{origin}" in self._world.disk.harmed
        if run.id in self._world.users.doomed:
            words = (
                *("model.path", "limits.step_timeout_s"),
                *("instances died one after the other", "groups failed one after the other"),
            )
            return any(each in run.reason for each in words)
        return run.reason.startswith("from_checkpoint: ") and harmed

    def _origin(self, run: runs.RunState, history: list[Item]) -> StoredCheckpoint | None:
        """The checkpoint that a fork's live lineage begins with."""
        found = [event for _, event in history if isinstance(event, ev.VersionRestored) and event.source_run]
        if not found:
            return None
        directory = f"{self._world.data_dir}/runs/{found[-1].source_run}"
        for stored in self._world.disk.checkpoints:
            if (stored.directory, stored.name) == (directory, found[-1].checkpoint):
                if run.ledger.first_step != found[-1].frontier_step:
                    raise Violation(
                        f"fork: {run.id} begins with step {run.ledger.first_step}, not its origin's"
                    )
                return stored
        raise Violation(f"fork: {run.id} begins with {found[-1].checkpoint}, which never was")

    async def _history(self, run: str) -> list[Item]:
        """The run's events as anyone may read them: files first, then what is still in memory."""
        assert self._world.coordinator is not None
        found: list[Item] = []
        while page := await self._world.coordinator.event_log.history.page(
            run, found[-1][0] if found else -1
        ):
            found += page
        return found

    async def _archived(self, run: runs.RunState) -> None:
        """Archives the run; raises `Violation` when the API shows something else of it then."""
        coordinator = self._world.coordinator
        assert coordinator is not None
        if run.id in coordinator.event_log.state.runs:
            shown = coordinator.reads.run(run.id)
            await coordinator.archive.once()
            if run.id in coordinator.event_log.state.runs or coordinator.reads.run(run.id) != shown:
                raise Violation("an archived run shows something else")
        if coordinator.reads.run(run.id).state != run.state:
            raise Violation(f"archived run {run.id} shows {coordinator.reads.run(run.id).state}")

    def _weights(self, run: runs.RunState) -> Weights | None:
        """The head's weights: in a trainer that made it, or on the disk."""
        head = run.lineage.head
        made = [i.made for i in self._world.instances.values() if isinstance(i, Trainer)]
        found = [weights[run.directory, head] for weights in made if (run.directory, head) in weights]
        found += [
            stored.weights
            for stored in self._world.disk.checkpoints
            if (stored.directory, stored.version.number) == (run.directory, head)
        ]
        return found[0] if found else None

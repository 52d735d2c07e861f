"""A coordinator's histories on a real store, and the events of a run that trains, for tests of what is kept."""

import asyncio
import time

from headrace_coordinator.app import Coordinator
from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain import run_states
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.sessions import FleetSettings
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.store.history import History
from headrace_coordinator.store.redis_store import RedisStore
from headrace_schema.spec import RunSpec

SPEC = RunSpec.model_validate(
    {
        "name": "r",
        "steps": 1000,
        "model": {"path": "m"},
        "data": {"source": "copy_digits", "heldout": 1},
        "algorithm": {"group_size": 2, "prompts_per_step": 2},
        "reward": {"scorers": [{"name": "exact"}]},
    }
).model_dump(mode="json")


class Opened:
    """A coordinator's event log and reads on a store, with its task."""

    @classmethod
    async def on(cls, server, directory):
        self = cls()
        self.event_log = EventLog(RedisStore(server.url), time.time, history=History(directory / "runs"))
        await self.event_log.open("test", directory / "store_id")
        fleet = Fleet(self.event_log, lambda *_: None, FleetSettings())
        self.coordinator = Coordinator(self.event_log, fleet, directory)
        self.task = asyncio.create_task(self.event_log.run())
        return self

    async def kill(self):
        """The process is gone where it stands: nothing more is written."""
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)

    async def events(self, after=0):
        """Ids of a whole stream; the run has ended."""
        return [event.id async for event in self.coordinator.past.events("r", after)]

    async def snapshot(self):
        """Saves one now."""
        await self.event_log.flush()
        self.event_log._since_snapshot = 10**9
        self.event_log.post(ev.Noted(at=0, run="r", text="before the snapshot"))
        await self.event_log.flush()
        async with asyncio.timeout(20):
            while self.event_log._snapshot or self.event_log._since_snapshot > 10**8:  # noqa: ASYNC110
                await asyncio.sleep(0.01)


def submitted(directory="d", run="r", evaluation=None):
    return ev.RunSubmitted(at=1.0, run=run, spec=SPEC, directory=directory, evaluation=evaluation)


def restored(number, parent=0, ordinal=0, frontier=0, kept=None, **more):
    return ev.VersionRestored(
        at=0, run="r", number=number, parent=parent, ordinal=ordinal, digest=f"d{number}", checkpoint="",
        frontier_step=frontier, kept=kept, **more,
    )  # fmt: skip


def committed(step, number=None, parent=None, run="r"):
    number = step + 2 if number is None else number
    view = {
        "step": step + 1, "version": number, "wall_s": 1.0, "reward_mean": 0.5, "tokens": 4, "tokens_per_s": 4.0,
        "stage_s": {}, "devices": {}, "trained": 4, "dropped": 0, "max_staleness": 0,
        "figures": {"loss": float("nan")},
    }  # fmt: skip
    made = ev.Certificate(
        number=number, parent=number - 1 if parent is None else parent, ordinal=step + 1, digest="d", step=step,
        attempt=1, trained=[(2 * step, 0, 1, 2, 2)], dropped={}, set_digest="", tokens=4, tokens_by_version={},
        max_staleness=0, log_prob_mismatch_mean=0.0, drop_rate_by_length={}, drop_rate_by_pass_rate={},
    )  # fmt: skip
    return ev.StepCommitted(at=0, run=run, certificate=made, view=view)


def ended(run="r"):
    return [
        ev.RunStateChanged(at=0, run=run, state=state, reason="")
        for state in (run_states.PLANNING, run_states.CANCELLED)
    ]


async def train(event_log, steps, first=0, run="r"):
    for step in range(first, first + steps):
        assigned = ev.SlotsAssigned(at=0, run=run, slots=[(2 * step, 0, 1, "x")])
        event_log.post(assigned, committed(step, run=run))
    await event_log.flush()

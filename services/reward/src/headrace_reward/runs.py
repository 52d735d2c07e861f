"""Runs and what their answers are worth: weights, declared rewards, first recorded result wins.

Knows no gRPC and no pipe.
"""

from __future__ import annotations

import asyncio
import json
import math
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any, NamedTuple

from headrace_schema.sections.scoring import RewardSection, ScorerSection, set_of, short_names
from headrace_servicekit.rpc.digests import digest_bytes

from headrace_reward.config import PoolSettings
from headrace_reward.pool import Finding, InlinePool, Pool, ScorerPool


class Status(Enum):
    """How a scoring ended."""

    OK = "ok"
    ANSWER_FAILED = "answer failed"
    SCORER_BROKEN = "scorer broken"
    UNAVAILABLE = "scorer unavailable"


class Key(NamedTuple):
    """Which judgement is meant."""

    prompt_ordinal: int
    sample_index: int
    attempt: int
    evaluation: bool
    stage: str = ""


@dataclass(frozen=True)
class Item:
    """One attempt at a slot, to be judged."""

    prompt_ordinal: int
    sample_index: int
    attempt: int
    evaluation: bool
    cut_by_length: bool
    answer: Mapping[str, Any]
    """The fields of `Answer`."""
    stage: str = ""
    """The reward stage that judges it, one of `RewardSection.stages`; empty: the run's scorers."""

    @property
    def key(self) -> Key:
        """Its key."""
        return Key(self.prompt_ordinal, self.sample_index, self.attempt, self.evaluation, self.stage)


@dataclass(frozen=True)
class Verdict:
    """What an answer is worth; kept for long, so without the answer. `reward` is finite; 0 where the scorer broke."""

    key: Key
    status: Status
    reward: float
    parts: Mapping[str, float] = field(default_factory=dict)
    detail: str = ""
    wall_s: float = 0.0
    turns: tuple[float, ...] = ()
    """The reward by turn of the policy's; empty where no scorer tells it, or the reward is a declared one."""


class Conflict(Exception):
    """One key was used for two different contents; the message names both."""


@dataclass
class _Recorded:
    body: str
    verdict: Verdict | None = None
    waiting: list[asyncio.Future[Verdict]] = field(default_factory=list)

    def ask(self) -> asyncio.Future[Verdict]:
        """The verdict for one caller; others still get it when that caller is cancelled."""
        asked: asyncio.Future[Verdict] = asyncio.get_running_loop().create_future()
        if self.verdict is None:
            self.waiting.append(asked)
        else:
            asked.set_result(self.verdict)
        return asked

    def answer(self, outcome: Verdict | Exception) -> None:
        for asked in self.waiting:
            if asked.done():
                continue
            if isinstance(outcome, Exception):
                asked.set_exception(outcome)
            else:
                asked.set_result(outcome)
        self.waiting.clear()


class Run:
    """One open run: its scorers, their weights, and the results that were already given."""

    def __init__(
        self,
        section: RewardSection,
        directory: Path,
        settings: PoolSettings,
        *,
        inline: bool = False,
        leased: bool = False,
    ) -> None:
        self.section = section
        self.digest = ""
        sets = section.sets()
        short = short_names(entry.name for entries in sets.values() for entry in entries)
        self._parts = {name: part_names(entries, short) for name, entries in sets.items()}
        self._recorded: OrderedDict[tuple[Key, str], _Recorded] = OrderedDict()
        self._remembered = settings.remembered
        opening = self._opening(directory)
        self._pool: Pool = (
            InlinePool(opening)
            if inline
            else ScorerPool(opening, section.timeout_s, section.load_timeout_s, settings, leased=leased)
        )

    async def open(self) -> None:
        """Loads the scorers and sets `digest`; raises pool.OpenFault."""
        code = await self._pool.open()
        rules = self.section.model_dump(mode="json", exclude={"timeout_s", "load_timeout_s"})
        self.digest = digest_bytes(json.dumps([rules, code], sort_keys=True).encode())

    def lease(self, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """Scorers compute on a lease's devices; `holds`: whether it may be used still."""
        self._pool.lease(devices, holds)

    async def settle(self, notice_s: float) -> None:
        """Returns once no scorer computes under the lease; answers in hand are judged under the next one."""
        await self._pool.settle(notice_s)

    async def close(self) -> None:
        """Kills the children; results that are still awaited raise pool.PoolClosed."""
        await self._pool.close()

    def score(self, item: Item) -> asyncio.Future[Verdict]:
        """Judges an item, or repeats the first recorded verdict on it.

        A future and no coroutine: a step's answers come by the hundred and take microseconds, and a task for
        each would cost more than its scorer. The future raises PoolClosed when the run is closed meanwhile.

        Raises:
            Conflict: the slot's attempt was judged with another content.
        """
        body = digest_bytes(repr((item.answer, item.cut_by_length)).encode())
        # Held-out prompts are answered again after every few steps: there the answer is part of the key.
        key = (item.key, body if item.evaluation else "")
        recorded = self._recorded.get(key)
        if recorded is None:
            recorded = self._record(key, body, item)
        elif recorded.body != body:
            raise Conflict(
                f"slot ({item.prompt_ordinal}, {item.sample_index}) attempt {item.attempt} was scored with "
                "another answer; a new answer needs a new attempt number"
            )
        return recorded.ask()

    def _record(self, key: tuple[Key, str], body: str, item: Item) -> _Recorded:
        """Starts the judgement."""
        recorded = self._recorded[key] = _Recorded(body)
        name = "evaluation" if item.evaluation and self.section.evaluation else set_of(item.stage)

        def weigh(found: asyncio.Future[Finding]) -> None:
            try:
                verdict = self._weigh(found.result(), name, item)
            except Exception as error:  # noqa: BLE001 - raised again where the verdict is awaited
                self._recorded.pop(key, None)
                recorded.answer(error)
                return
            if verdict.status in (Status.SCORER_BROKEN, Status.UNAVAILABLE):
                # Such a scorer is tried again when the coordinator asks again.
                self._recorded.pop(key, None)
            recorded.verdict = verdict
            recorded.answer(verdict)

        self._pool.find({**item.answer, "set": name}).add_done_callback(weigh)
        while len(self._recorded) > self._remembered and next(iter(self._recorded.values())).verdict:
            self._recorded.popitem(last=False)
        return recorded

    def _weigh(self, found: Finding, name: str, item: Item) -> Verdict:
        if found.fault in ("scorer", "unavailable"):
            status = Status.SCORER_BROKEN if found.fault == "scorer" else Status.UNAVAILABLE
            return Verdict(item.key, status, 0.0, found.parts, found.detail, found.wall_s)
        turns: tuple[float, ...] = ()
        if found.fault == "answer":
            status, reward = Status.ANSWER_FAILED, self.section.failed_reward
        else:
            weighted = zip(self.section.sets()[name], self._parts[name], strict=True)
            # fsum: weights of .7, .2 and .1 of full scores are 1, which `sum` misses.
            status = Status.OK
            reward = math.fsum(
                entry.weight * found.scores[part] for entry, part in weighted if part in found.scores
            )
            turns = self._turns(found, name)
        if not math.isfinite(reward):
            detail = f"the weighted sum is {reward}; lower reward.{name}[].weight"
            return Verdict(item.key, Status.SCORER_BROKEN, 0.0, found.parts, detail, found.wall_s)
        truncated = self.section.truncated_reward
        # An evaluation measures: the reward that shapes training stays out of it.
        if truncated is not None and item.cut_by_length and not item.evaluation and not item.stage:
            reward, turns = truncated, ()
        return Verdict(item.key, status, reward, found.parts, found.detail, found.wall_s, turns)

    def _turns(self, found: Finding, name: str) -> tuple[float, ...]:
        """Weighted scores by turn; what a scorer gives for the whole answer is given at the last turn."""
        if not found.turns:
            return ()
        count = max(map(len, found.turns.values()))
        turns = [0.0] * count
        for entry, part in zip(self.section.sets()[name], self._parts[name], strict=True):
            if part in found.scores:
                whole = [0.0] * (count - 1) + [found.scores[part]]
                for place, score in enumerate(found.turns.get(part, whole)):
                    turns[place] += entry.weight * score
        return tuple(turns)

    def _opening(self, directory: Path) -> dict[str, Any]:
        sets = {
            name: [
                {"name": entry.name, "options": entry.options, "part": part}
                for entry, part in zip(entries, self._parts[name], strict=True)
            ]
            for name, entries in self.section.sets().items()
        }
        return {
            "operation": "open",
            "directory": str(directory),
            "sets": sets,
            "give": list(self.section.give),
            "pictures": self.section.pictures,
            "env": list(self.section.env),
            "timeout_s": self.section.timeout_s,
        }


def part_names(entries: list[ScorerSection], short: Mapping[str, str]) -> list[str]:
    """A name for each scorer's part: its own in short, with #2, #3 … where it occurs again."""
    seen: dict[str, int] = {}
    names = []
    for entry in entries:
        name = short[entry.name]
        seen[name] = seen.get(name, 0) + 1
        names.append(name if seen[name] == 1 else f"{name}#{seen[name]}")
    return names


class Runs:
    """The open runs of this instance, by resource name; `inline` judges in this process, without limits."""

    def __init__(self, directory: Path, settings: PoolSettings, *, inline: bool = False) -> None:
        self._directory, self._settings, self._inline = directory, settings, inline
        self._runs: dict[str, Run] = {}
        self._leases: dict[int, tuple[str, tuple[str, ...], Callable[[], bool]]] = {}
        """Run and devices by epoch, and whether the lease may be used still."""

    async def open(self, name: str, section: RewardSection, *, leased: bool = False) -> Run:
        """Opens a run that is not open; `leased`: it scores under leases alone. Raises OpenFault, see Run.open."""
        run = Run(section, self._directory, self._settings, inline=self._inline, leased=leased)
        await run.open()
        self._runs[name] = run
        for owner, devices, holds in self._leases.values():
            if owner == name:
                run.lease(devices, holds)
        return run

    def lease(self, epoch: int, name: str, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """A run's scorers compute on a lease's devices; `holds`: whether it may be used still."""
        self._leases[epoch] = name, tuple(devices), holds
        if (run := self._runs.get(name)) is not None:
            run.lease(devices, holds)

    async def settle(self, epoch: int, notice_s: float) -> None:
        """Ends what is computed under a lease, by force after the notice."""
        name, _, _ = self._leases.pop(epoch, ("", (), None))
        if (run := self._runs.get(name)) is not None:
            await run.settle(notice_s)

    def get(self, name: str) -> Run | None:
        """The open run of that name."""
        return self._runs.get(name)

    async def close(self, name: str) -> None:
        """Closes a run; one that is not open stays closed."""
        run = self._runs.pop(name, None)
        if run is not None:
            await run.close()

    async def close_all(self) -> None:
        """Closes every run."""
        for name in list(self._runs):
            await self.close(name)

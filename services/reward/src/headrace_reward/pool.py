"""A run's children: shares answers out, holds each to its time limit, replaces what dies.

Knows answers and verdicts on single scorers; weights, rewards and RPCs are `runs` and `service`.
"""

from __future__ import annotations

import asyncio
import contextlib
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from headrace_servicekit.process.worker import UsersCode, Worker, WorkerGone, WorkerTimeout, exit_description
from headrace_servicekit.process.worker_pipes import JSON_CODEC
from headrace_servicekit.process.worker_pipes import JsonMessage as Message

from headrace_reward import judge
from headrace_reward.config import PoolSettings
from headrace_reward.place import Place
from headrace_reward.scorers.base import ScorerError, Unavailable

# A child that died may have been killed from outside: its answer is tried in a second one before it counts as failed.
_TRIES = 2
_DEATHS = 3
"""Answers one after the other, of all children, each of which ended them: it is not the answers' fault."""


class OpenFault(Exception):
    """The scorers cannot be opened: `field` of scorer `index` of set `scorer_set` has to change.

    `away`: what the scorer stands on, such as a judge's endpoint, is not there now; later it may be.
    """

    def __init__(self, scorer_set: str, index: int, field: str, message: str, *, away: bool = False) -> None:
        super().__init__(message)
        self.scorer_set, self.index, self.field, self.message = scorer_set, index, field, message
        self.away = away


@dataclass(frozen=True)
class Finding:
    """What came of one answer."""

    fault: judge.Fault = ""
    detail: str = ""
    scores: dict[str, float] = field(default_factory=dict)
    turns: dict[str, list[float]] = field(default_factory=dict)
    parts: dict[str, float] = field(default_factory=dict)
    wall_s: float = 0.0


@dataclass
class _Job:
    answer: Message
    found: asyncio.Future[Finding]
    tries: int = 0
    alone: bool = False
    """Several answers that were judged at once have failed: each is judged by itself now."""


@dataclass(frozen=True)
class _At:
    """Where loading is: a scorer, and whether it is being `loaded` or `probed with a blank answer`."""

    scorer_set: str
    index: int
    doing: str

    def fault(self, message: str) -> OpenFault:
        return OpenFault(self.scorer_set, self.index, "name", message)


class PoolClosed(Exception):
    """The pool was closed while the answer waited."""


class Pool(Protocol):
    """What judges the answers of a run."""

    async def open(self) -> dict[str, list[str]]:
        """Loads the scorers; returns each one's code digest, by set. Raises OpenFault."""
        ...

    def find(self, answer: Message) -> asyncio.Future[Finding]:
        """Judges one answer; the future ends with PoolClosed where the pool closes first."""
        ...

    def lease(self, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """A lease's devices are to be used; `holds`: whether it may be used still."""
        ...

    async def settle(self, notice_s: float) -> None:
        """Returns once nothing is judged under the lease, at the latest a little after the notice."""
        ...

    async def close(self) -> None:
        """Ends what `open` began."""
        ...


class ScorerPool(Pool):
    """Children that hold the scorers of one run. `opening` is the `open` message each of them gets.

    `leased`: they judge under a lease alone, on its devices.
    """

    def __init__(
        self,
        opening: Message,
        timeout_s: float,
        load_timeout_s: float,
        settings: PoolSettings,
        *,
        leased: bool = False,
    ) -> None:
        self._place = Place(
            UsersCode(opening["sets"], Path(opening["directory"]), opening["env"]), leased=leased
        )
        self._opening = opening
        self._timeout_s = timeout_s
        self._load_timeout_s = load_timeout_s
        self._settings = settings
        self._queue: asyncio.Queue[list[_Job]] = asyncio.Queue()
        """Answers that go to a child together: those of one group, whose comparisons it remembers, else one."""
        self._waiting: dict[tuple[str, tuple[str, ...]], list[_Job]] = {}
        """The entry of the queue that takes further answers, by set and group."""
        self._children = settings.children
        self._workers: list[asyncio.Task[None]] = []
        self._digests: dict[str, list[str]] = {}
        self._at_once: set[str] = set()
        """Sets whose answers are judged at once, and so have their time limits together."""
        self._deaths = 0
        self._closed = False

    async def open(self) -> dict[str, list[str]]:
        """Starts the first child and the workers; returns each scorer's code digest, by set.

        Raises:
            OpenFault: a scorer cannot be loaded, or does not survive its probe.
        """
        first = await self._start()
        counted = range(self._children)
        self._workers = [
            asyncio.create_task(self._work(first if number == 0 else None), name=f"scorer-worker-{number}")
            for number in counted
        ]
        return self._digests

    def find(self, answer: Message) -> asyncio.Future[Finding]:
        """Judges one answer; the future always ends, at the latest with PoolClosed when the pool closes."""
        job = _Job(answer, asyncio.get_running_loop().create_future())
        if self._closed:
            _settle_exception(job)
        else:
            self._put(job)
        return job.found

    def _put(self, job: _Job) -> None:
        group = tuple(job.answer.get("group", ()))
        key = (str(job.answer["set"]), group)
        if group and (together := self._waiting.get(key)):
            together.append(job)
            return
        jobs = [job]
        if group:
            self._waiting[key] = jobs
        self._queue.put_nowait(jobs)

    def lease(self, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """A lease's devices are those of the children; `holds`: whether it may be used still."""
        self._place.lease(devices, holds)

    async def settle(self, notice_s: float) -> None:
        """Returns once nothing is judged under the lease; what takes longer is judged again under the next one."""
        await self._place.settle(notice_s)

    async def close(self) -> None:
        """Kills the children; answers that still wait raise PoolClosed."""
        self._closed = True
        for worker in self._workers:
            worker.cancel()
        await asyncio.gather(*self._workers, return_exceptions=True)
        while not self._queue.empty():
            for job in self._queue.get_nowait():
                _settle_exception(job)

    async def _work(self, child: Worker[Message] | None) -> None:
        jobs: deque[_Job] = deque()
        try:
            while True:
                jobs.extend(await self._take())
                while jobs:
                    await self._place.granted()
                    if child is not None and not self._place.fits(child):
                        await child.kill()
                        child = None
                    if child is None:
                        child = await self._replace(jobs)
                        continue
                    with self._place.working():
                        judged = await self._judge(child, jobs)
                    if not judged:
                        await child.kill()
                        child = None
        finally:
            for job in jobs:
                _settle_exception(job)
            if child is not None:
                await child.kill()

    async def _take(self) -> list[_Job]:
        """At least one job; more where they wait, but a fair share."""
        jobs = self._taken(await self._queue.get())
        share = min(self._settings.batch - 1, self._queue.qsize() // self._children)
        for _ in range(share):
            if len(jobs) >= self._settings.batch:
                break
            jobs += self._taken(self._queue.get_nowait())
        return jobs

    def _taken(self, jobs: list[_Job]) -> list[_Job]:
        if group := jobs[0].answer.get("group"):
            self._waiting.pop((str(jobs[0].answer["set"]), tuple(group)), None)
        return list(jobs)

    async def _replace(self, jobs: deque[_Job]) -> Worker[Message] | None:
        """A fresh child; where none can be had, the jobs are the scorer's fault and None comes back."""
        for attempt in range(1, _TRIES + 1):
            try:
                return await self._start()
            except OpenFault as fault:
                if attempt == _TRIES or fault.away:
                    kind: judge.Fault = "unavailable" if fault.away else "scorer"
                    broken = Finding(kind, f"the scorers cannot be loaded again: {fault.message}")
                    break
        while jobs:
            _settle(jobs.popleft(), broken)
        return None

    async def _judge(self, child: Worker[Message], jobs: deque[_Job]) -> bool:
        """Judges jobs from the left, taking off what is settled; False when the child is no longer of use."""
        asked = deque([jobs[0]] if jobs[0].alone else jobs)
        child.send({"operation": "score", "answers": [job.answer for job in asked]})
        at_once = sum(job.answer["set"] in self._at_once for job in asked)
        while asked:
            limit = self._timeout_s * max(1, at_once)
            begin = time.monotonic()
            try:
                reply = await child.receive(limit)
            except (WorkerTimeout, WorkerGone) as error:
                if not self._place.held:  # Its lease has ended: it is judged under the next one.
                    return False
                wall_s = time.monotonic() - begin
                if at_once > 1:
                    await child.kill()
                    for job in asked:
                        job.alone = True
                elif isinstance(error, WorkerTimeout):
                    detail = f"scoring took longer than reward.timeout_s = {self._timeout_s:g} s"
                    _settle(jobs.popleft(), Finding("answer", detail, wall_s=wall_s))
                else:
                    await self._blame(child, jobs, wall_s)
                return False
            at_once -= asked.popleft().answer["set"] in self._at_once
            self._deaths = 0
            _settle(jobs.popleft(), Finding(**reply))
        return True

    async def _blame(self, child: Worker[Message], jobs: deque[_Job], wall_s: float) -> None:
        """The child ended while it judged the leftmost job."""
        jobs[0].tries += 1
        status = await child.wait_or_kill()
        if jobs[0].tries >= _TRIES:
            self._deaths += 1
            detail = f"the scoring process {exit_description(status)}, {_TRIES} times"
            broken = self._deaths >= _DEATHS
            if broken:
                detail += f", with each of {self._deaths} answers one after the other"
            _settle(jobs.popleft(), Finding("scorer" if broken else "answer", detail, wall_s=wall_s))

    async def _start(self) -> Worker[Message]:
        child = await self._place.start(self._settings.memory_bytes)
        try:
            child.send(self._opening)
            at = _At("scorers", 0, "loaded")
            while not isinstance(step := await self._load(child, at), dict):
                at = step
            self._compare(step["digests"])
            self._at_once = set(step["at_once"])
            if step["one_process"]:
                self._children = 1
        except BaseException:  # cancelled too: nobody else ends a child that did not load
            await child.kill()
            raise
        return child

    async def _load(self, child: Worker[Message], at: _At) -> _At | Message:
        """The next step of loading, which the child announces, or {digests, at_once, one_process} at its end.

        So an error can name the scorer that hung or died.
        """
        loads = at.doing == "loaded"
        limit = self._load_timeout_s if loads else self._timeout_s
        try:
            reply = await child.receive(limit)
        except WorkerTimeout as error:
            key = "load_timeout_s" if loads else "timeout_s"
            raise at.fault(f"was {at.doing} for {limit:g} s without an end (reward.{key})") from error
        except WorkerGone as error:
            status = await child.wait_or_kill()
            raise at.fault(f"its process {exit_description(status)} while it was {at.doing}") from error
        if "error" in reply:
            raise OpenFault(**reply["error"])
        if "at" in reply:
            return _At(**reply["at"])
        return reply

    def _compare(self, digests: dict[str, list[str]]) -> None:
        """Every child of a run runs the same code: a result stands under one scorer digest."""
        if self._digests and digests != self._digests:
            raise OpenFault(
                "scorers", 0, "name", "its code has changed since the run was opened; submit a new run"
            )
        self._digests = digests


async def list_scorers(settings: PoolSettings) -> list[Message]:
    """Name, description and options_schema of every registered scorer, from a child made for the question.

    Raises:
        WorkerGone, WorkerTimeout: the child could not tell.
    """
    child = await Worker.start("headrace_reward.child", JSON_CODEC, settings.memory_bytes, code=UsersCode())
    async with contextlib.AsyncExitStack() as stack:
        stack.push_async_callback(child.kill)
        child.send({"operation": "catalogue"})
        listed: list[Message] = (await child.receive(settings.load_timeout_s))["scorers"]
        return listed


def _settle(job: _Job, finding: Finding) -> None:
    if not job.found.done():
        job.found.set_result(finding)


def _settle_exception(job: _Job) -> None:
    if not job.found.done():
        job.found.set_exception(PoolClosed())


class InlinePool(Pool):
    """Judges answers one by one where it is called; `opening` as in ScorerPool."""

    def __init__(self, opening: dict[str, Any]) -> None:
        self._opening = opening
        self._loaded: dict[str, list[judge.LoadedScorer]] = {}

    async def open(self) -> dict[str, list[str]]:
        """Loads the scorers; returns their code digests. Raises OpenFault.

        They are not tried on a blank answer: a breakpoint() in one should first stop at an answer of the policy.
        """
        directory = Path(self._opening["directory"])
        for name, entries in self._opening["sets"].items():
            self._loaded[name] = []
            for index, entry in enumerate(entries):
                try:
                    each = judge.load(
                        entry["name"], entry["options"], entry["part"], directory, self._opening["give"]
                    )
                except ScorerError as error:
                    away = isinstance(error, Unavailable)
                    raise OpenFault(name, index, error.field, error.message, away=away) from error
                self._loaded[name].append(each)
        return {name: [each.digest for each in loaded] for name, loaded in self._loaded.items()}

    def find(self, answer: dict[str, Any]) -> asyncio.Future[Finding]:
        """Judges one answer, at once."""
        fields = dict(answer)
        (judged,) = judge.judge(self._loaded[fields.pop("set")], [judge.answer_of(fields)])
        found: asyncio.Future[Finding] = asyncio.get_running_loop().create_future()
        found.set_result(
            Finding(judged.fault, judged.detail, dict(judged.scores), dict(judged.turns), dict(judged.parts))
        )
        return found

    def lease(self, devices: Sequence[str], holds: Callable[[], bool]) -> None:
        """Judges in this process whatever the devices are."""

    async def settle(self, notice_s: float) -> None:
        """Nothing runs beside the caller."""

    async def close(self) -> None:
        return

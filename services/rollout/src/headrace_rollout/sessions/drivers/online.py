"""Sessions of an online run: clients from outside begin them, and those that they reward fill the slots of steps.

A session is bound to a slot once it is rewarded, so that one whose client takes its time holds nobody up. Requests wait
while no stream is open, such as between two steps; none fails for it. Knows no HTTP.
"""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from headrace.rollout.v1 import rollout_pb2
from headrace_schema.sections.agent import OnlineSection
from headrace_servicekit.rpc.requests import check_number

from headrace_rollout.endpoint.answers import Terms
from headrace_rollout.endpoint.requests import Refusal
from headrace_rollout.endpoint.session import AgentSession
from headrace_rollout.engines.base import Refused
from headrace_rollout.engines.samples import GIVEN, Conversation, Finish, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.sessions.turns import Asked, Player, Says, Speaker

if TYPE_CHECKING:
    from headrace_rollout.runs.opened import OnlineRun
    from headrace_rollout.sessions.drivers.base import Put

LOG = logging.getLogger(__name__)
SWEEP_S = 1.0
_AGAIN_S = 0.05
"""How long a turn that was stopped waits before it is asked for again, where no other stream has opened."""
_KEYS = 2**31


@dataclass(frozen=True, eq=False)
class Slot:
    """A slot to fill with a rewarded session whose tokens are of version `oldest` or later, by `emit`."""

    key: SlotKey
    attempt: int
    oldest: int
    emit: Callable[[TrajectoryUpdate], None]
    owner: object
    """The stream that was assigned it."""


@dataclass(eq=False)
class Open:
    """A session that has no reward yet; `at` is when it was last heard of."""

    session: AgentSession
    group: str
    at: float
    key: str = ""
    """Of the request that began it."""


@dataclass(eq=False)
class Rewarded:
    """A session that is over; `oldest` is the oldest version that sampled a token of it."""

    talk: Conversation
    finish: Finish
    oldest: int
    at: float
    state: str = "waiting"

    def fill(self, slot: Slot) -> None:
        """Sends it as what fills a slot."""
        slot.emit(self.talk.ended(slot.key, slot.attempt, self.oldest, self.finish))


class Desk:
    """The sessions of a run at its instance, which outlive the streams of its steps.

    `kept` says whether the instance still keeps the trajectory of a slot. It is sent again when it is requested again,
    after its stream broke or the coordinator restarted.
    """

    def __init__(
        self,
        key: str,
        section: OnlineSection,
        terms: Terms,
        player: Player,
        stream: Stream,
        group_size: int,
        kept: Callable[[SlotKey], bool],
    ) -> None:
        self.key, self.terms, self.player, self.stream = key, terms, player, stream
        self.mark = ""
        """What the ids of its sessions begin with: where the endpoint is."""
        self.counts: Counter[str] = Counter()
        """Sessions that are over: how many were taken, unrewarded, stale, untrained, incomplete and withdrawn."""
        self._told: Counter[str] = Counter()
        self._section, self._group_size, self._kept = section, group_size, kept
        self._open: dict[str, Open] = {}
        self._rewarded: dict[str, list[Rewarded]] = defaultdict(list)
        self._slots: dict[SlotKey, Slot] = {}
        self._filled: dict[SlotKey, Rewarded] = {}
        self._speaker: Says | None = None
        self._changed = asyncio.Event()
        self._closed = False
        self._sweeping: asyncio.Task[None] | None = None

    # --- clients

    def begin(self, group: str = "", key: str = "") -> AgentSession:
        """A new session; those of a `group` are compared with each other. Raises Refusal.

        A request of the `key` of one that is open is the same one, sent again.
        """
        if found := next((each for each in self._open.values() if key and each.key == key), None):
            return found.session
        if self._group_size > 1 and not group:
            reason = f"the run compares {self._group_size} sessions of a group (algorithm.group_size)"
            raise Refusal(400, "invalid_request", f"group: {reason}; name one, such as the task's", "group")
        waiting = sum(map(len, self._rewarded.values()))
        if len(self._open) + waiting >= self._section.max_sessions:
            most = f"{self._section.max_sessions} sessions are open (agent.online.max_sessions)"
            raise Refusal(429, "too_many_sessions", f"{most}; reward some, or ask again later")
        slot = SlotKey(secrets.randbelow(_KEYS), 0)
        session = AgentSession(slot, 1, self.terms, self, mark=self.mark, secret=self.key)
        self._open[session.id] = Open(session, group, time.monotonic(), key)
        if self._sweeping is None:
            self._sweeping = asyncio.create_task(self._sweep(), name="drop sessions without a reward")
        return session

    def find(self, id: str) -> AgentSession:
        """The open session of an id. Raises Refusal 404."""
        if (found := self._open.get(id)) is None:
            reason = "it was rewarded or withdrawn, its reward came too late, or it never was"
            raise Refusal(404, "not_found", f"no session {id[:40]!r} is open: {reason}")
        return found.session

    def with_id(self, id: str) -> AgentSession | None:
        """The open session with this id."""
        found = self._open.get(id)
        return found.session if found else None

    def end(self, session: AgentSession) -> str:
        """What becomes of a session that has its last reward: taken, waiting (for a step), stale or untrained."""
        found = self._open.pop(session.id)
        talk = session.join()
        versions = [number for branch in talk.branches for number, _ in branch.spans if number > GIVEN]
        rewarded = Rewarded(talk, session.finish, min(versions, default=0), time.monotonic())
        if talk.turns and not session.learned:
            self._count("untrained", [rewarded])
            return rewarded.state
        group = found.group if self._group_size > 1 else session.id
        self._rewarded[group].append(rewarded)
        self._match()
        return rewarded.state

    def drop(self, session: AgentSession, why: str) -> None:
        """A session that will have no reward."""
        if self._open.pop(session.id, None) is not None:
            session.join()  # Ends what it waits for.
            if session.talk.turns:
                self.counts[why] += 1
                LOG.info("session %s is dropped: %s", session.id, why)

    def figures(self) -> dict[str, object]:
        """What there is now, and what became of the sessions that are over."""
        return {
            "open": len(self._open),
            "rewarded": sum(map(len, self._rewarded.values())),
            "wanted": len(self._slots),
            "answering": self._speaker is not None,
            "ended": dict(self.counts),
        }

    def news(self) -> dict[str, int]:
        """What became of the sessions that ended since this was asked last."""
        found, self._told = self.counts - self._told, self.counts.copy()
        return dict(found)

    # --- the policy

    async def say(self, asked: Asked) -> TrajectoryUpdate:
        """The turn, however often streams end meanwhile: what was told of it stays, as the beginning of the turn."""
        while True:
            speaker, turn = await self._speaking(), None
            with suppress(Refused):  # paused, or another version is installed meanwhile
                turn = await speaker.say(asked)
            if turn is not None and not turn.stopped and turn.finish is not None:
                return turn
            if turn is not None and turn.whole and turn.whole.token_ids and asked.heard is not None:
                asked = replace(asked, prefix=turn.whole)
            with suppress(TimeoutError):
                async with asyncio.timeout(_AGAIN_S):
                    await self._changed.wait()

    async def _speaking(self) -> Says:
        while self._speaker is None:
            if self._closed:
                raise Refusal(503, "run_over", "the run has left this instance; see headrace run endpoint")
            await self._changed.wait()
        return self._speaker

    # --- streams

    def opened(self, speaker: Says) -> None:
        """Requests are answered by it from now on."""
        self._speaker = speaker
        self._wake()

    def left(self, speaker: Says, owner: object) -> None:
        """A stream has ended: what it was assigned is nobody's, and requests wait for the next one."""
        self._withdraw(owner)
        if self._speaker is speaker:
            self._speaker = None
            self._wake()

    def offer(self, slots: Iterable[Slot]) -> None:
        """Slots to fill."""
        for slot in slots:
            filled = self._filled.get(slot.key)
            if filled is not None and self._kept(slot.key):
                filled.fill(slot)
            else:
                self._slots[slot.key] = slot
        self._match()

    def stop(self, owner: object = None) -> None:
        """What a stream was assigned (None: any) and is not filled comes back to it as stopped."""
        for slot in self._withdraw(owner):
            slot.emit(TrajectoryUpdate.untouched(slot.key, slot.attempt, 0))

    def _withdraw(self, owner: object) -> list[Slot]:
        found = [slot for slot in self._slots.values() if owner in (None, slot.owner)]
        for slot in found:
            del self._slots[slot.key]
        return found

    def close(self) -> None:
        """Ends all sessions."""
        self._closed = True
        self._wake()
        if self._sweeping is not None:
            self._sweeping.cancel()
        for each in list(self._open.values()):
            self.drop(each.session, "withdrawn")

    def _wake(self) -> None:
        self._changed.set()
        self._changed = asyncio.Event()

    # --- which session fills which slot

    def _match(self) -> None:
        """Fills slots with whole groups of rewarded sessions, those that were complete first at first."""
        for group in list(self._rewarded):
            several = self._rewarded[group]
            while len(several) >= self._group_size and (whole := self._whole()):
                members = several[: self._group_size]
                del several[: self._group_size]
                oldest = min(each.oldest for each in members)
                slots = next((one for one in whole if max(slot.oldest for slot in one) <= oldest), [])
                for slot, member in zip(slots, members, strict=False):
                    del self._slots[slot.key]
                    self._filled = {key: each for key, each in self._filled.items() if self._kept(key)}
                    self._filled[slot.key] = member
                    member.fill(slot)
                self._count("taken" if slots else "stale", members)
            if not several:
                del self._rewarded[group]

    def _whole(self) -> list[list[Slot]]:
        """The slots of each prompt that wants a whole group, by prompt."""
        found: dict[int, list[Slot]] = defaultdict(list)
        for slot in self._slots.values():
            found[slot.key.prompt_ordinal].append(slot)
        return [slots for _, slots in sorted(found.items()) if len(slots) == self._group_size]

    def _count(self, what: str, members: Sequence[Rewarded]) -> None:
        self.counts[what] += len(members)
        for each in members:
            each.state = what
        if what != "taken":
            LOG.info("%d rewarded sessions are dropped: %s", len(members), what)

    async def _sweep(self) -> None:
        """Drops sessions whose reward does not come, and groups that are not completed."""
        while True:
            await asyncio.sleep(min(SWEEP_S, self._section.reward_within_s / 4))
            self.look()

    def look(self) -> None:
        """One round of it."""
        now = time.monotonic()
        for each in list(self._open.values()):
            each.at = max(each.at, now if each.session.exchanges.under_way else each.session.answered_at)
            if now - each.at > self._section.reward_within_s:
                self.drop(each.session, "unrewarded")
        if self._group_size == 1:
            return
        for group, several in list(self._rewarded.items()):
            short = len(several) < self._group_size
            if short and now - max(each.at for each in several) > self._section.reward_within_s:
                del self._rewarded[group]
                self._count("incomplete", several)


class OnlineDriver:
    """The slots of one stream, which the run's desk fills."""

    def __init__(self, run: OnlineRun, stream: Stream, put: Put) -> None:
        self._engine, self._desk, self._put = run.engine, run.desk, put
        self._speaker = Speaker(run.desk.player, stream)
        self._desk.opened(self._speaker)

    async def read(self, groups: Sequence[rollout_pb2.GroupAssignment]) -> Sequence[Slot]:
        """The slots of an assignment. Raises INVALID."""
        found = []
        for group in groups:
            check_number("prompt_ordinal", group.prompt_ordinal)
            for sample in group.samples:
                check_number("samples.sample_index", sample.sample_index)
                key = SlotKey(group.prompt_ordinal, sample.sample_index)
                found.append(Slot(key, sample.attempt, group.oldest_version, self._emit, self))
        return found

    async def begin(self, assigned: Sequence[Slot]) -> None:
        """Offers them."""
        self._desk.offer(assigned)
        if self._engine.paused:  # What came behind the pause comes back at once too.
            await self.abort()

    async def abort(self) -> None:
        """What is not filled comes back as stopped."""
        self._desk.stop(self)

    async def close(self) -> None:
        """Ends the turns; requests wait for the next stream."""
        self._desk.left(self._speaker, self)
        await self._speaker.close()

    def tell(self, response: rollout_pb2.GenerateResponse) -> None:
        """Adds what became of sessions."""
        response.sessions.update(self._desk.news())

    def _emit(self, update: TrajectoryUpdate) -> None:
        self._put([update])

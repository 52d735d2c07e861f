"""The single writer: applies events to the state, appends them to the store's log, wakes tasks that wait for the state.

Has the coordinator's two clocks: `now`, the wall clock, for the times that people read in events, and `monotonic`,
for everything that is measured or expires; no value of it enters the log. Knows no rule of its own. `commit` returns
once its events are durable, so an effect that waits for it is never sent before the append; `post` is for events that
nothing waits for.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable
from contextlib import suppress
from pathlib import Path

import msgspec
from headrace_servicekit.lease.clock import boottime

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import State, snapshot
from headrace_coordinator.store.base import (
    LEAP,
    Fenced,
    Marks,
    Store,
    StoreAway,
    Stored,
    StoreMarker,
)
from headrace_coordinator.store.contents import read
from headrace_coordinator.store.history import TAIL_LIMIT, History
from headrace_coordinator.store.run_files import Line
from headrace_coordinator.waits import WaitTimeout

log = logging.getLogger(__name__)
SNAPSHOT_EVERY = 2000
RETRY_S = 0.2
CLAIM_RETRY_S = 1.0
MOST_LEAPS = 1024
LINGER_S = 0.05
"""Seconds after which events that nothing waits for are appended, together with later ones."""
STALL_S = 5.0
"""A wait that ends this many seconds after its deadline shows that this process was stopped: it waits again."""
TICK_S = 0.001
"""Seconds added to a deadline's timer: the event loop may call it a little early."""
Posted = tuple[int, bytes, ev.Event]
"""Number, encoded event, event."""


class EventLog:
    """State and its one writer."""

    def __init__(
        self,
        store: Store,
        now: Callable[[], float],
        monotonic: Callable[[], float] = boottime,
        *,
        history: History | None = None,
    ) -> None:
        self.state = State()
        self.history = history or History()
        self.observers: list[Callable[[ev.Event], None]] = []
        """Called with each new event, in the task that posts it."""
        self.store_trouble = ""
        self.loss = ""
        """What the store has lost, as this start found; "" where it has lost nothing."""
        self.now = now
        self.monotonic = monotonic
        self.fenced: asyncio.Future[str] | None = None
        self._store = store
        self._writing = asyncio.Lock()
        self._marker = StoreMarker(None)
        self._sequence = 0
        self._appended = 0
        self._since_snapshot = 0
        self._pending: list[Posted] = []
        self._snapshot: tuple[int, bytes] | None = None
        self._snapshot_due = asyncio.Event()
        self._durable: list[tuple[int, asyncio.Future[None]]] = []
        self._due = asyncio.Event()
        self._linger: asyncio.TimerHandle | None = None
        self._waiters: dict[asyncio.Future[None], Callable[[], bool]] = {}
        self._waking = False

    # --- start

    async def open(self, identity: str, marker: Path | None = None) -> None:
        """Takes the store, rebuilds the state and begins a new coordinator epoch.

        Raises:
            Fenced: another coordinator leads.
            ForeignStore: the store is not the one that `marker` (a file in the data directory) belongs to.
            DamagedStore: its snapshot or an event of its log cannot be read.
        """
        await self._store.claim(identity)
        stored = await self._store.load()
        self._marker = StoreMarker(marker)
        store_id, seen = self._marker.identify(stored.store_id)
        self.state, events = read(stored)
        for _, event, _ in events:
            self.state.apply(event)
        self.history.locate(self.state.runs.values())
        await self._recover_history(stored, events)
        self._since_snapshot = len(events)  # One that starts often would never come to a snapshot else.
        known = max(stored.epoch, self.state.epoch)
        if seen.epoch > known or seen.sequence > stored.sequence:
            self.loss = (
                f"the store's log ends at {stored.sequence} of epoch {known}, and {seen.sequence} of epoch "
                f"{seen.epoch} has been seen: it is an older copy, or lost its end; runs are rebuilt from their "
                "checkpoints and histories"
            )
            log.warning("%s", self.loss)
        epoch = max(known, seen.epoch) + 1
        await self._store.begin(epoch, store_id)
        # Each coordinator since an older copy was made has leapt once: this one leaps beyond all of them.
        leap = LEAP * min(epoch - known, MOST_LEAPS)
        self._appended = stored.sequence
        self._sequence = max(stored.sequence + leap, seen.sequence + LEAP)
        self.fenced = asyncio.get_running_loop().create_future()
        self.post(ev.CoordinatorStarted(epoch=epoch, store_id=store_id, leap=leap))
        if self.loss:
            self._say_loss()
        self._marker.keep(store_id, Marks(epoch, seen.sequence))

    def _say_loss(self) -> None:
        """Tells the users of all runs; lists runs again that had ended, and names those that are not known any more."""
        for run in list(self.state.active_runs()):
            self.post(ev.Noted(run=run.id, text=self.loss))
        found, unknown = self.history.strangers({*self.state.runs, *self.state.ended})
        for summary in found:
            self.post(ev.RunArchived(**summary))
        if unknown:
            self.loss += f"; of {', '.join(unknown)} it knows nothing more: submit each one's run.json again"
            log.warning("%s", self.loss)

    def mark(self) -> None:
        """Writes the log's position into the data directory, so that an older copy of the log is recognised."""
        self._marker.keep(self.state.store_id, Marks(self.state.epoch, self._appended))

    @property
    def store_away(self) -> bool:
        """Whether the store does not answer or refuses writes; `store_trouble` says why."""
        return bool(self.store_trouble)

    async def _recover_history(self, stored: Stored, events: list[tuple[int, ev.Event, bytes]]) -> None:
        lines: dict[str, list[Line]] = {run: [] for run in self.state.runs}
        deleted = {event.run for _, event, _ in events if isinstance(event, ev.RunDeleted)}
        for number, event, payload in events:
            if ev.is_public(event) and event.run not in deleted:
                lines.setdefault(event.run, []).append((number, payload))
        await self.history.recover(lines, stored.snapshot_sequence, stored.sequence)
        for name in lines.keys() - self.state.runs.keys():
            self.history.forget(name)
        for name in deleted:  # A kill may have come between the event and the removal.
            with suppress(OSError):  # Who deleted it was told.
                await self.history.remove(name)

    # --- writing

    def post(self, *events: ev.Event) -> None:
        """Applies events now; they become durable in order, soon."""
        for event in events:
            if not event.at:
                msgspec.structs.force_setattr(event, "at", self.now())
            self._sequence += 1
            self.state.apply(event)
            if ev.is_public(event):
                self.history.posted(event.run, self._sequence)
            self._pending.append((self._sequence, ev.encode(event), event))
            for observe in self.observers:
                observe(event)
        if events:
            if self._linger is None:
                self._linger = asyncio.get_running_loop().call_later(LINGER_S, self._due.set)
            self.wake()

    async def commit(self, *events: ev.Event) -> None:
        """Applies events and returns when they, and all before them, are durable (G8)."""
        self.post(*events)
        await self.flush()

    async def flush(self) -> None:
        """Returns when all events posted so far are durable."""
        if self._appended_through(self._sequence):
            return
        future: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        self._durable.append((self._sequence, future))
        self._due.set()
        await future

    @property
    def durable_sequence(self) -> int:
        """Number of the last durable event."""
        return self._appended

    def _appended_through(self, sequence: int) -> bool:
        return not self._pending or self._appended >= sequence

    async def run(self) -> None:
        """Appends, writes histories and saves snapshots for ever."""
        async with asyncio.TaskGroup() as tasks:
            tasks.create_task(self._append_all(), name="append")
            tasks.create_task(self.history.run(), name="history")
            tasks.create_task(self._save_snapshots(), name="snapshot")

    async def _append_all(self) -> None:
        """Appends all pending events in one group commit, for ever."""
        while True:
            await self._due.wait()
            self._due.clear()
            if self._linger is not None:
                self._linger.cancel()
                self._linger = None
            if self.history.backlog > TAIL_LIMIT:
                await self.history.written()
            if self._pending:
                await self._append(list(self._pending))
            self._plan_snapshot()

    async def _append(self, batch: list[Posted]) -> None:
        first, last = batch[0][0], batch[-1][0]
        payloads = [payload for _, payload, _ in batch]
        await self._write(lambda: self._store.append(self.state.epoch, self._appended, first, payloads))
        del self._pending[: len(batch)]
        self._appended = last
        self._since_snapshot += len(batch)
        public = [
            (event.run, sequence, event, payload) for sequence, payload, event in batch if ev.is_public(event)
        ]
        if public:
            self.history.extend(public)
        ready = [future for sequence, future in self._durable if sequence <= last]
        self._durable = [(sequence, future) for sequence, future in self._durable if sequence > last]
        for future in ready:
            if not future.done():
                future.set_result(None)

    async def _write(self, attempt: Callable[[], Awaitable[None]]) -> None:
        """Repeats a write until the store takes it; never returns once another coordinator has the store."""
        while True:
            try:
                async with self._writing:
                    await attempt()
                break
            except StoreAway as error:
                self._set_trouble(str(error))
                await asyncio.sleep(RETRY_S)
            except Fenced as error:
                self._stop_for(error)
                await asyncio.Event().wait()  # No effect may be sent any more; the process is about to stop.
        self._set_trouble("")

    def _stop_for(self, error: Fenced) -> None:
        if self.fenced and not self.fenced.done():
            self.fenced.set_result(str(error))

    async def raise_epoch(self, seen: int) -> None:
        """Goes on under an epoch above `seen`: first the store's, then the state's, so that no append is fenced."""

        async def attempt() -> None:
            present = self.state.epoch
            if seen >= present:
                await self._store.raise_epoch(present, seen + 1, self.state.store_id)
                self.post(ev.EpochRaised(epoch=seen + 1))

        log.warning("coordinator epoch %d was seen; this one goes on above it", seen)
        await self._write(attempt)
        self.mark()

    def _plan_snapshot(self) -> None:
        """Takes a snapshot when one is due. It has events that are not appended yet, so it is saved once they are."""
        if self._snapshot is None and self._since_snapshot >= SNAPSHOT_EVERY:
            self._snapshot, self._since_snapshot = (self._sequence, snapshot(self.state)), 0
        if self._snapshot is not None and self._appended >= self._snapshot[0]:
            self._snapshot_due.set()

    async def _save_snapshots(self) -> None:
        while True:
            await self._snapshot_due.wait()
            self._snapshot_due.clear()
            if self._snapshot is None:
                continue
            # Saving it trims the log, which must not hold the only copy of an event.
            await self.history.written()
            await self._save_snapshot(*self._snapshot)
            self._snapshot = None

    async def _save_snapshot(self, sequence: int, data: bytes) -> None:
        try:
            async with self._writing:
                await self._store.save_snapshot(self.state.epoch, sequence, data)
        except StoreAway as error:
            log.warning("the snapshot is not saved, as the store is away: %s", error)
        except Fenced as error:
            self._stop_for(error)

    async def keep_claim(self, interval_s: float) -> None:
        """Renews the leader's claim for ever, more often while the store refuses. `store_trouble` has its error."""
        while True:
            await asyncio.sleep(min(interval_s, CLAIM_RETRY_S) if self.store_away else interval_s)
            try:
                async with self._writing:
                    await self._store.keep_claim()
            except StoreAway as error:
                self._set_trouble(str(error))
            except Fenced as error:
                self._stop_for(error)
                await asyncio.Event().wait()  # The process is about to stop.
            else:
                self._set_trouble("")
                self.mark()

    def _set_trouble(self, words: str) -> None:
        """Keeps the store's error; an empty one after a write that it accepted."""
        if bool(words) != self.store_away:
            log.warning("the store is away: %s", words) if words else log.info("the store is back")
            self.wake()
        self.store_trouble = words

    # --- waiting

    def wake(self) -> None:
        """Plans one check of all waiters in this turn of the event loop.

        `post` calls it; others do when something changes that is no event (a session, a supervisor).
        """
        if not self._waking and self._waiters:
            self._waking = True
            asyncio.get_running_loop().call_soon(self._wake_now)

    def _wake_now(self) -> None:
        self._waking = False
        for waiter, predicate in list(self._waiters.items()):  # The longest waiting one comes first.
            if waiter.done():
                continue
            # Checking here costs a tenth of waking each waiter's task at every event, to check for itself.
            try:
                if predicate():
                    waiter.set_result(None)
            except Exception as error:  # noqa: BLE001 - raised in the waiter's task
                waiter.set_exception(error)

    async def wait_until(self, predicate: Callable[[], bool], timeout: float, what: str) -> None:
        """Waits until `predicate` holds; raises `WaitTimeout` that names `what`."""
        if predicate():
            return
        loop = asyncio.get_running_loop()
        deadline = loop.time() + timeout
        while not predicate():
            left = deadline - loop.time()
            if left < -STALL_S:
                # This process stood still: what is waited for could not arrive, and gets its time again.
                left, deadline = timeout, loop.time() + timeout
            if left <= 0:
                raise WaitTimeout(f"waited {timeout:.0f} s for {what}")
            waiter: asyncio.Future[None] = loop.create_future()
            timer = loop.call_at(deadline + TICK_S, _end_wait, waiter)
            self._waiters[waiter] = predicate
            try:
                await waiter
            finally:
                timer.cancel()
                self._waiters.pop(waiter, None)


def _end_wait(waiter: asyncio.Future[None]) -> None:
    if not waiter.done():
        waiter.set_result(None)

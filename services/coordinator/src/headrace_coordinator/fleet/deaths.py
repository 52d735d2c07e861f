"""Whose code ran in an instance that died: charges the death of a shared instance to the run that caused it.

Of every instance it knows for a moment that it ended: it may come back.

Reward instances and simulators run the code of many runs' users at once. Knows what each run has in hand at which
instance; asks nothing itself.
"""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.store.event_log import EventLog
from headrace_coordinator.waits import Waits, WaitTimeout

MOST_DEATHS = 5
"""Deaths charged to a run, without a step between them, after which it has FAILED."""
NEAR_S = 10.0
"""A call that broke so long before an instance's exit was noticed may be what ended it."""
TURN_S, LONGEST_TURN_S = 20.0, 600.0
"""A suspect whose code works for so long keeps the others waiting no more; twice as long once it was too short."""
LOOK_S = 1.0
RESTART_S = 20.0
"""How long after its exit an instance is still expected back: a supervisor restarts the process."""


@dataclass(eq=False)
class Use:
    """A run's code at work in an instance; `broke_at`: when its call broke, None while it goes on."""

    run: str
    kind: str
    incarnation: str
    began: float
    broke_at: float | None = None


class Deaths:
    """The deaths of shared instances.

    A death in which one run alone had code in hand is charged to it. After one in which several had, these take
    turns at each instance, so that the next one tells them apart; a run whose turn ends well is no suspect any more.
    One that is still at work after its turn stays a suspect: it may be what ends the instance a little later.
    """

    def __init__(self, event_log: EventLog, waits: Waits) -> None:
        self._event_log = event_log
        self._waits = waits
        self._uses: list[Use] = []
        self._suspects: set[str] = set()
        self._turn_s = TURN_S
        self._charged_at: dict[tuple[str, str], float] = {}
        self._ordered: set[str] = set()
        self._ended: dict[str, tuple[float, InstanceState]] = {}
        """By name: when an instance ended, and as it was."""

    # --- what runs where

    def begin(self, run: str, instance: InstanceState) -> Use:
        """The run's code begins to work in an instance."""
        use = Use(run, instance.kind, instance.incarnation, self._event_log.monotonic())
        self._uses.append(use)
        return use

    def end(self, use: Use) -> None:
        """The code has answered: a later death of the instance is not its fault."""
        if use in self._uses:
            self._uses.remove(use)
            self._tell_suspects()

    def broke(self, use: Use) -> None:
        """The call ended without an answer: the instance may have died of it, which is noticed a little later."""
        now = use.broke_at = self._event_log.monotonic()
        self._uses = [each for each in self._uses if self._fresh(each, now)]
        self._tell_suspects()

    def _tell_suspects(self) -> None:
        if self._suspects:
            self._event_log.wake()

    def clear(self, run: str) -> None:
        """The run's code did what it was asked for, and the instance lives: it is no suspect."""
        self._suspects.discard(run)
        if not self._suspects:
            self._turn_s = TURN_S

    @asynccontextmanager
    async def opening(self, run: str, instance: InstanceState) -> AsyncIterator[None]:
        """The body loads the run's code in an instance, once no other suspect works there."""
        await self.turn(run, instance)
        use = self.begin(run, instance)
        try:
            yield
        except BaseException:
            self.broke(use)
            raise
        self.end(use)

    # --- turns

    def suspected(self, run: str) -> bool:
        """Whether an instance has died with code of this run, among others, in hand."""
        return run in self._suspects

    def may_begin(self, run: str, instance: InstanceState) -> bool:
        """Whether the run may begin work in an instance: suspects do one after the other."""
        if run not in self._suspects:
            return True
        now = self._event_log.monotonic()
        mine = [
            use for use in self._uses if use.incarnation == instance.incarnation and self._fresh(use, now)
        ]
        others = [use for use in mine if use.run != run and use.run in self._suspects]
        return not any(now - use.began <= self._turn_s for use in others)

    async def turn(self, run: str, instance: InstanceState) -> None:
        """Waits until the run may begin work in an instance; a turn ends after a while."""
        while not self.may_begin(run, instance):
            what = f"its turn at {instance.instance}, which died with code of several runs in hand"
            with self._waits.named(run, what):
                try:
                    await self._event_log.wait_until(lambda: self.may_begin(run, instance), LOOK_S, what)
                except WaitTimeout:
                    continue

    # --- deaths

    def order(self, incarnation: str) -> None:
        """The coordinator kills a process: nobody's code is to blame."""
        self._ordered.add(incarnation)

    def returning(self) -> list[InstanceState]:
        """Instances that ended a moment ago and are not back, as they were: a supervisor restarts them."""
        here = {state.instance for state in self._event_log.state.instances.values()}
        since = self._event_log.monotonic() - RESTART_S
        return [state for at, state in self._ended.values() if at > since and state.instance not in here]

    def died(self, incarnation: str) -> None:
        """A process has ended: charges its end to a run, or suspects those that had code in hand."""
        now = self._event_log.monotonic()
        uses = [use for use in self._uses if use.incarnation == incarnation]
        self._uses = [use for use in self._uses if use not in uses and self._fresh(use, now)]
        instance = self._event_log.state.instances.get(incarnation)
        if instance is not None:
            self._ended[instance.instance] = now, instance
        ordered = incarnation in self._ordered or (instance is not None and instance.draining)
        self._ordered.discard(incarnation)
        blamed = {use.run for use in uses if self._fresh(use, now)}
        if ordered or not blamed:
            return
        found = blamed & self._suspects or blamed
        known = self._event_log.state.runs.keys()
        if len(found) > 1:
            if found <= self._suspects:  # They took turns, and a turn was too short.
                self._turn_s = min(2 * self._turn_s, LONGEST_TURN_S)
            self._suspects |= found & known
            return
        (run,) = found
        if run not in known:
            return  # A submission's trial: what it submits next is charged.
        began = max(use.began for use in uses if use.run == run)
        self._charge(run, uses[0].kind, instance.instance if instance else incarnation, began)

    def _fresh(self, use: Use, now: float) -> bool:
        return use.broke_at is None or now - use.broke_at < NEAR_S

    def _charge(self, run: str, kind: str, name: str, began: float) -> None:
        if began <= self._charged_at.get((run, kind), float("-inf")):
            return  # Instances that died of one batch, or of one cause beside it, count once.
        self._charged_at[run, kind] = self._event_log.monotonic()
        count = self._in_a_row(run, kind) + 1
        text = f"{name} died while code of this run alone was at work in it ({count} of {MOST_DEATHS})"
        progress = self._event_log.state.runs[run].progress
        self._event_log.post(ev.DeathCharged(run=run, text=text, kind=kind, count=count, progress=progress))

    def _in_a_row(self, run: str, kind: str) -> int:
        """Deaths that were charged to the run since its last step; also those that an earlier coordinator charged."""
        state = self._event_log.state.runs.get(run)
        charged = state.deaths.get(kind) if state else None
        return charged.count if state and charged and charged.progress == state.progress else 0

    def fatal(self, run: str, kind: str) -> str:
        """Why the run has FAILED: how often instances of a kind died of its code in a row; "" while it may go on."""
        count = self._in_a_row(run, kind)
        if count < MOST_DEATHS:
            return ""
        return f"{count} {kind} instances died one after the other while code of this run alone was at work"

    def forget(self, run: str) -> None:
        """The run has ended."""
        self.clear(run)
        self._uses = [use for use in self._uses if use.run != run]
        for key in [key for key in self._charged_at if key[0] == run]:
            del self._charged_at[key]

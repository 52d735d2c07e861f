"""Gives devices to another run that shares them, while this run generates: when they idle, or its turn is over.

The lease manager knows who waits for them, and `domain.devices.sharing` decides when this run gives way. Between two
stages a run that shares holds no device anyway.
"""

from __future__ import annotations

from headrace_coordinator.domain.devices.sharing import releases_to
from headrace_coordinator.run.context import RunContext
from headrace_coordinator.waits import WaitTimeout

LOOK_S = 1.0
"""No event tells that a turn is over: this is how often it is looked at."""


class Sharing:
    """One step attempt's generation, as other runs see it."""

    def __init__(self, context: RunContext) -> None:
        self._context = context
        self._index = context.state.ledger.index
        self._clock = context.event_log.monotonic
        self._over = False
        self._began = self._clock()
        self._turn: tuple[int, ...] = ()
        self._finished = 0
        spec = context.spec
        self._wanted = spec.placement.share
        # Episodes and conversations would begin anew elsewhere, and a deterministic run decodes in a fixed order: these
        # give way only where nothing is in hand.
        self._in_parts = not spec.deterministic and context.modality.resumable

    def close(self) -> None:
        """Generation is over."""
        self._over = True
        self._context.event_log.wake()

    async def run(self) -> None:
        """Works until it is closed: gives way whenever another run is due."""
        while self._wanted and not self._over:
            try:
                await self._context.event_log.wait_until(
                    lambda: self._over or self._due(), LOOK_S, "a run that shares the devices"
                )
            except WaitTimeout:
                continue
            if not self._over:
                await self._context.lending.release_to_other_run()

    def _due(self) -> bool:
        held = [worker for worker in self._context.workers.rollouts if worker.lease_epoch]
        if not held:
            return False
        self._note_turn(tuple(worker.lease_epoch for worker in held))
        devices = [device for worker in held for device in worker.devices]
        waiter = self._context.fleet.lease_manager.next_for(devices, self._context.run_id)
        if waiter is None:
            return False
        idle = not self._index.waiting and not self._index.assigned
        made = self._in_parts and self._done() > self._finished
        held_s = self._clock() - self._began
        return releases_to(waiter, self._context.state.priority, held_s, made=made, idle=idle)

    def _note_turn(self, epochs: tuple[int, ...]) -> None:
        if epochs != self._turn:
            self._turn, self._began, self._finished = epochs, self._clock(), self._done()

    def _done(self) -> int:
        """How many slots of the step need no device any more."""
        return len(self._context.state.ledger.slots) - self._index.waiting - self._index.assigned

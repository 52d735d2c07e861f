"""An instance that tries a part of a spec before there is a run, under a name that no run has."""

from __future__ import annotations

import uuid
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TypeVar

from headrace_coordinator.domain.state import InstanceState
from headrace_coordinator.fleet.fleet import Fleet
from headrace_coordinator.fleet.worker_client import WorkerClient

Client = TypeVar("Client", bound=WorkerClient)


@contextmanager
def on_trial(kind: type[Client], chosen: InstanceState, fleet: Fleet, trials: set[str]) -> Iterator[Client]:
    """A client of the instance; its name is among `trials` meanwhile, so that nobody takes it for a stray run."""
    client = kind(
        f"trial-{uuid.uuid4().hex[:6]}",
        chosen,
        fleet.client(chosen.incarnation),
        fleet.event_log.state.epoch,
        open_id=fleet.next_open_id(),
    )
    trials.add(client.run)
    try:
        yield client
    finally:
        trials.discard(client.run)  # What could not be closed is closed by the reconciler.

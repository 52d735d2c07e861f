"""What a store holds, decoded. `python -m headrace_coordinator.store.contents URL` says as JSON what can be read.

`headrace repair` runs it on a copy of a store that it has cut. Knows no file of a store.
"""

from __future__ import annotations

import argparse
import asyncio
import json
from pathlib import Path
from typing import Any

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.state import State, restore
from headrace_coordinator.store.base import DamagedStore, Stored, StoreMarker
from headrace_coordinator.store.redis_store import RedisStore

Event = tuple[int, ev.Event, bytes]
"""Number, event, encoded event."""


def read(stored: Stored) -> tuple[State, list[Event]]:
    """The snapshot's state, and the events after it, which are not applied yet. Raises `DamagedStore`."""
    damaged, number = "snapshot", stored.snapshot_sequence
    try:
        state = restore(stored.snapshot) if stored.snapshot else State()
        events: list[Event] = []
        damaged = "event"
        for number, payload in stored.events:
            events.append((number, ev.decode(payload), payload))
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        good = events[-1][0] if damaged == "event" and events else stored.snapshot_sequence
        raise DamagedStore(damaged, number, good, str(error)) from error
    return state, events


async def describe(url: str, store_id: str = "", epoch: int = 0) -> dict[str, Any]:
    """What can be read; an empty store becomes the one of `store_id`, where it is given, as of `epoch`.

    Keys: `snapshot` and `last`, numbers of events, 0 for none; `runs`, states by id; where it is damaged, `damaged`
    ("snapshot" or "event"), `number` and `error`, else "", 0 and "".
    """
    store = RedisStore(url)
    try:
        stored = await store.load()
        if store_id and not stored.store_id:
            await store.begin(epoch, store_id)
        found: dict[str, Any] = {"snapshot": stored.snapshot_sequence, "last": stored.sequence, "runs": {}}
        try:
            state, events = read(stored)
        except DamagedStore as error:
            return found | {"damaged": error.what, "number": error.number, "error": error.reason}
        for _, event, _ in events:
            state.apply(event)
        states = {run.id: run.state for run in state.runs.values()}
        return found | {"runs": states, "damaged": "", "number": 0, "error": ""}
    finally:
        await store.close()


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("url")
    parser.add_argument("--marker", type=Path, help="the file `store_id` beside a store, which may be empty")
    options = parser.parse_args()
    store_id, marks = StoreMarker(options.marker).expected()
    print(json.dumps(asyncio.run(describe(options.url, store_id, marks.epoch))))


if __name__ == "__main__":
    main()

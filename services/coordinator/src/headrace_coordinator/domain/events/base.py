"""What every event is. Knows none of them."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """A fact that has happened; `at` is seconds since the Unix epoch."""

    at: float


class RunEvent(Event, frozen=True, kw_only=True):
    """A fact about one run; shown on the run's event stream."""

    run: str

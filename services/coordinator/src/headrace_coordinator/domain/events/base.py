"""What every event is. Knows none of them."""

from __future__ import annotations

import msgspec


class Event(msgspec.Struct, frozen=True, tag_field="type", omit_defaults=True):
    """A fact that has happened."""

    at: float = 0.0
    """Seconds since the Unix epoch; of an event that does not say it, when the log takes it."""


class RunEvent(Event, frozen=True, kw_only=True):
    """A fact about one run; shown on the run's event stream."""

    run: str

"""States and intents of a run: which may follow, and what the run's controller does next. Knows no run."""

from __future__ import annotations

import msgspec

QUEUED, PLANNING, RUNNING, PAUSING, PAUSED, RECOVERING, CANCELLING = (
    "QUEUED",
    "PLANNING",
    "RUNNING",
    "PAUSING",
    "PAUSED",
    "RECOVERING",
    "CANCELLING",
)
SUCCEEDED, FAILED, CANCELLED = "SUCCEEDED", "FAILED", "CANCELLED"
TERMINAL = frozenset({SUCCEEDED, FAILED, CANCELLED})
ADMITTED = frozenset({PLANNING, RUNNING, RECOVERING, PAUSING, CANCELLING})
"""States of a run that a run loop works on; in all others a run holds nothing."""
STATES = (QUEUED, *sorted(ADMITTED), PAUSED, *sorted(TERMINAL))

RUN, PAUSE, PAUSE_NOW, CANCEL = "RUN", "PAUSE", "PAUSE_NOW", "CANCEL"
INTENTS = (RUN, PAUSE, PAUSE_NOW, CANCEL)

_ENDS = {CANCELLING, CANCELLED, FAILED, QUEUED}
FOLLOWS: dict[str, frozenset[str]] = {
    QUEUED: frozenset({PLANNING, PAUSED, CANCELLED, FAILED}),
    PLANNING: frozenset({RUNNING, PAUSING, PAUSED, RECOVERING, *_ENDS}),
    RUNNING: frozenset({PAUSING, PAUSED, RECOVERING, SUCCEEDED, *_ENDS}),
    PAUSING: frozenset({PAUSED, RUNNING, SUCCEEDED, *_ENDS}),
    PAUSED: frozenset({QUEUED, CANCELLED, FAILED}),
    RECOVERING: frozenset({PLANNING, RUNNING, PAUSING, PAUSED, *_ENDS}),
    CANCELLING: frozenset({CANCELLED, FAILED}),
    SUCCEEDED: frozenset(),
    FAILED: frozenset(),
    CANCELLED: frozenset(),
}

# What the run's controller does next: MOVE changes its state, the others concern an admitted run's work.
WAIT, WORK, STOP_AT_BOUNDARY, STOP_NOW, MOVE = "WAIT", "WORK", "STOP_AT_BOUNDARY", "STOP_NOW", "MOVE"


class IllegalTransition(Exception):
    """A state that may not follow the present one."""


class IllegalIntent(Exception):
    """A request that the run's state does not allow; the message is for its user."""


class Action(msgspec.Struct, frozen=True):
    """The next action of a run's controller; `state` and `reason` belong to MOVE."""

    kind: str
    state: str = ""
    reason: str = ""


_QUEUED = {
    RUN: Action(WAIT),
    PAUSE: Action(MOVE, PAUSED, "paused while it was queued; resume queues it again"),
    PAUSE_NOW: Action(MOVE, PAUSED, "paused while it was queued; resume queues it again"),
    CANCEL: Action(MOVE, CANCELLED, "cancelled while it was queued"),
}
_WORKING = {
    RUN: Action(WORK),
    PAUSE: Action(MOVE, PAUSING, "pauses after the step in hand"),
    PAUSE_NOW: Action(MOVE, PAUSING, "pauses at once"),
    CANCEL: Action(MOVE, CANCELLING, "cancel asked for"),
}
ACTIONS: dict[str, dict[str, Action]] = {
    QUEUED: _QUEUED,
    PLANNING: _WORKING,
    RUNNING: _WORKING,
    RECOVERING: _WORKING,
    PAUSING: {
        RUN: Action(MOVE, RUNNING, "resumed before it had paused"),
        PAUSE: Action(STOP_AT_BOUNDARY),
        PAUSE_NOW: Action(STOP_NOW),
        CANCEL: Action(MOVE, CANCELLING, "cancel asked for"),
    },
    PAUSED: {
        RUN: Action(MOVE, QUEUED, "resumed"),
        PAUSE: Action(WAIT),
        PAUSE_NOW: Action(WAIT),
        CANCEL: Action(MOVE, CANCELLED, "cancelled while it was paused"),
    },
    CANCELLING: dict.fromkeys(INTENTS, Action(STOP_NOW)),
    **{state: dict.fromkeys(INTENTS, Action(WAIT)) for state in TERMINAL},
}
"""The next action for every pair of state and intent."""

"""Who is silent, and for how long: processes without a session, and those that peers have lost. Decides nothing."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from headrace_coordinator.fleet.sessions import FleetSettings, Session

MISSED_BEATS = 2
BEATS_OF_SUSPECTS = 1.5


class Silences:
    """When each process was last heard, where its session has ended or misses heartbeats."""

    def __init__(
        self, sessions: Mapping[str, Session], settings: FleetSettings, monotonic: Callable[[], float]
    ) -> None:
        self._sessions = sessions
        self._settings = settings
        self._monotonic = monotonic
        self._since: dict[str, float] = {}
        self._suspects: dict[str, set[str]] = {}
        """Who says of whom that it is lost, by the incarnation that says so."""

    def heard(self, incarnation: str) -> None:
        """Its session has opened."""
        self._since.pop(incarnation, None)

    def begins(self, incarnation: str, since: float) -> float:
        """It has no session any more; returns since when, which is the first that was said."""
        return self._since.setdefault(incarnation, since)

    def forget(self, incarnation: str) -> None:
        """Its process has ended."""
        self._since.pop(incarnation, None)
        self._suspects.pop(incarnation, None)
        for found in self._suspects.values():
            found.discard(incarnation)

    def starts_anew(self) -> None:
        """This process stood still and could hear nobody: all silences begin now."""
        self._since = dict.fromkeys(self._since, self._monotonic())

    def last_heard(self, incarnation: str) -> float:
        """When a process was last heard, on this process's clock; now for one of which nothing is known."""
        session = self._sessions.get(incarnation)
        return session.heard_at if session else self._since.get(incarnation, self._monotonic())

    def seconds(self, incarnation: str) -> float:
        """Seconds since a registered process was last heard of, beyond two missed heartbeats; else 0."""
        silent = self._monotonic() - self.last_heard(incarnation)
        return silent if silent > MISSED_BEATS * self._settings.heartbeat else 0.0

    def suspects(self, incarnation: str, found: Iterable[str]) -> None:
        """A process has lost these others of its run; none: it hears all of them."""
        self._suspects.pop(incarnation, None)
        if lost := set(found):
            self._suspects[incarnation] = lost

    def lost_by_all(self) -> list[tuple[str, float]]:
        """Who is lost by a peer and silent here, too, and for how long.

        A heartbeat that is missed is enough where two have not heard a process; one that sent it is let live.
        """
        now, missed = self._monotonic(), BEATS_OF_SUSPECTS * self._settings.heartbeat
        named = sorted(set().union(*self._suspects.values()))
        silent = [(who, now - self.last_heard(who)) for who in named]
        return [(who, seconds) for who, seconds in silent if seconds > missed]

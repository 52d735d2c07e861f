"""Policy versions as a pure reducer: one live chain by parent, numbers that only rise (G2)."""

from __future__ import annotations

import msgspec

from headrace_coordinator.domain import events as ev


class Version(msgspec.Struct):
    """A policy version; `live` until a rewind abandons it."""

    number: int
    parent: int
    ordinal: int
    digest: str
    live: bool = True


class Lineage(msgspec.Struct):
    """All versions of a run, its head, and the highest number ever set aside."""

    versions: dict[int, Version] = {}
    head: int = 0
    last_number: int = 0

    @property
    def base(self) -> Version | None:
        """The version that the next step starts from."""
        return self.versions.get(self.head)

    def apply(self, event: ev.Event) -> None:
        """Folds one event; events of other parts are ignored."""
        match event:
            case ev.CoordinatorStarted(leap=leap):
                self.last_number += leap if self.last_number else 0
            case ev.NumberBurnt(number=number) | ev.StepOpened(number=number):
                self.last_number = max(self.last_number, number)
            case ev.VersionRestored():
                self._restore(event)
            case ev.StepCommitted(certificate=certificate):
                self._add(certificate.number, certificate.parent, certificate.ordinal, certificate.digest)

    def _restore(self, event: ev.VersionRestored) -> None:
        ancestors = set(self.chain(event.parent))
        for version in self.versions.values():
            version.live = version.number in ancestors
        self._add(event.number, event.parent, event.ordinal, event.digest)

    def _add(self, number: int, parent: int, ordinal: int, digest: str) -> None:
        self.versions[number] = Version(number, parent, ordinal, digest)
        self.head = number
        self.last_number = max(self.last_number, number)

    def chain(self, number: int) -> list[int]:
        """`number` and its ancestors, newest first."""
        numbers = []
        while number in self.versions:
            numbers.append(number)
            number = self.versions[number].parent
        return numbers

    def staleness(self, generating: int, base: int) -> int | None:
        """ordinal(base) − ordinal(generating) when the latter is base or its live ancestor, else None (G3)."""
        made, ancestor = self.versions.get(generating), self.versions.get(base)
        # Ordinals never rise towards the root: the walk is as long as the sample is old, not as the run.
        while made is not None and ancestor is not None and ancestor.ordinal >= made.ordinal:
            if ancestor is made:
                return self.versions[base].ordinal - made.ordinal
            ancestor = self.versions.get(ancestor.parent)
        return None


def plan_lost_rewind(lineage: Lineage, step: ev.StepCommitted) -> list[ev.Event]:
    """The rewind before a committed step whose base the log does not know, made up from the step's certificate.

    A checkpoint's ledger repeats steps and no rewinds. Without this one, the chain of a log that is older than
    the checkpoint ends at the step, and everything before it counts as abandoned.
    """
    made = step.certificate
    if made.parent in lineage.versions:
        return []
    same = next(
        (v for v in lineage.chain(lineage.head) if lineage.versions[v].ordinal == made.ordinal - 1), None
    )
    if same is None:
        return []
    return [
        ev.VersionRestored(
            at=step.at,
            run=step.run,
            number=made.parent,
            parent=same,
            ordinal=made.ordinal - 1,
            digest=lineage.versions[same].digest,
            checkpoint="",
            frontier_step=made.step,
            warmup_steps=0,
        )
    ]

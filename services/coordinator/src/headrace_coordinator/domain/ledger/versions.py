"""Policy versions as a pure reducer: one live chain by parent, numbers that only rise (G2).

Keeps the versions that a rule may ask for; of all others, whether a rewind abandoned them.
"""

from __future__ import annotations

from collections.abc import Container

import msgspec

from headrace_coordinator.domain import events as ev
from headrace_coordinator.domain.ledger.compact import expand, expand_drops


class Version(msgspec.Struct):
    """A policy version; `live` until a rewind abandons it."""

    number: int
    parent: int
    ordinal: int
    digest: str
    live: bool = True


class Lineage(msgspec.Struct):
    """Recent versions of a run, its head, the newest number that was ever a version's, and the highest set aside.

    `rewinds` are open intervals (checkpoint's number, number given to its restored content): what lies between is
    abandoned.
    """

    versions: dict[int, Version] = {}
    head: int = 0
    last_number: int = 0
    newest: int = 0
    rewinds: list[tuple[int, int]] = []

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
        for version in self.versions.values():
            version.live = version.live and version.number <= event.parent
        self.rewinds = [interval for interval in self.rewinds if interval[0] < event.parent]
        if self.newest > event.parent:
            self.rewinds.append((event.parent, event.number))
        self._add(event.number, event.parent, event.ordinal, event.digest)

    def _add(self, number: int, parent: int, ordinal: int, digest: str) -> None:
        self.versions[number] = Version(number, parent, ordinal, digest)
        self.head = number
        self.last_number = max(self.last_number, number)
        self.newest = max(self.newest, number)

    def abandoned(self, number: int) -> bool:
        """A rewind went back behind this version."""
        return any(low < number < high for low, high in self.rewinds)

    def prune(self, max_staleness: int, pinned: Container[int]) -> None:
        """Removes versions that no rule asks for: older than `max_staleness`, or abandoned, and not `pinned`."""
        base = self.base
        if base is None or len(self.versions) <= 2 * (max_staleness + 8):
            return
        oldest = base.ordinal - max_staleness
        self.versions = {
            number: version
            for number, version in self.versions.items()
            if number in pinned or (version.live and version.ordinal >= oldest)
        }

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
    """The rewind before a committed step whose base the log does not know, reconstructed from the step's certificate.

    A checkpoint's ledger repeats steps and no rewinds: without this one, a log that is older than the checkpoint
    would keep what the rewind abandoned beside the step that replaced it.
    """
    made = step.certificate
    if made.parent <= lineage.newest:
        return []
    same = next(
        (v for v in lineage.chain(lineage.head) if lineage.versions[v].ordinal == made.ordinal - 1), None
    )
    if same is None:
        return []
    prompts = [prompt for prompt, *_ in (*expand(made.trained), *expand_drops(made.dropped))]
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
            frontier_prompt=min(prompts, default=None),
            warmup_steps=0,
            recovery=True,
        )
    ]

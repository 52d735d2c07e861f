"""Samples that wait for a row, and the contexts that they share. Knows no model."""

from __future__ import annotations

from dataclasses import dataclass, field

from torch import Tensor

from headrace_rollout.engines.base import Finish, Group, Stream
from headrace_rollout.engines.sequence import Bounds, Sequence
from headrace_rollout.engines.stopping import StopMatcher
from headrace_rollout.engines.transformers.cache import PromptKeys


@dataclass(eq=False)
class Waiting:
    """Samples that share one context; `keys` and `hidden_D` are there once it was prefilled."""

    context_ids: list[int]
    members: list[Sequence]
    keys: PromptKeys | None = None
    hidden_D: Tensor | None = None
    wave: int = 0


@dataclass(eq=False)
class Arrivals:
    """Turns groups into waiting contexts: one for a group's fresh members, one for each with a prefix."""

    bounds: Bounds
    finished: list[tuple[Sequence, Finish]] = field(default_factory=list)

    def accept(self, stream: Stream, group: Group, matcher: StopMatcher | None, wave: int) -> list[Waiting]:
        """Contexts to compute; members that are at their end already go to `finished`."""
        fresh: list[Sequence] = []
        waiting: list[Waiting] = []
        for sample in group.samples:
            sequence = self.bounds.sequence(stream, group, sample, matcher)
            if finish := self.bounds.ended(sequence):
                self.finished.append((sequence, finish))
            elif sequence.prefix.token_ids:
                waiting.append(Waiting(sequence.context_ids(), [sequence], wave=wave))
            else:
                fresh.append(sequence)
        if fresh:
            waiting.insert(0, Waiting(list(group.prompt_ids), fresh, wave=wave))
        return waiting

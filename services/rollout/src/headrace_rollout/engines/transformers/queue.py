"""Which waiting samples join next: in order of arrival, as many as rows, memory and a token budget allow."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

from torch import Tensor

from headrace_rollout.engines.samples import Finish, Group, ImageAt, Stream
from headrace_rollout.engines.trajectory import Bounds, RunningTrajectory, StopMatcher
from headrace_rollout.engines.transformers.cache import PromptKeys


@dataclass(eq=False)
class Waiting:
    """Samples that share one context; `keys` and `hidden_D` are there once it was prefilled."""

    context_ids: list[int]
    members: list[RunningTrajectory]
    keys: PromptKeys | None = None
    hidden_D: Tensor | None = None
    routes: bytes = b""
    """Of the context, once it was prefilled and where they are recorded."""
    adapter: str = ""
    """By which it is computed; `Stream.adapter`."""


@dataclass(eq=False)
class Arrivals:
    """Turns groups into waiting contexts: one for a group's fresh members, one for each with a prefix."""

    bounds: Bounds
    finished: list[tuple[RunningTrajectory, Finish]] = field(default_factory=list)

    def accept(self, stream: Stream, group: Group, matcher: StopMatcher | None) -> list[Waiting]:
        """Contexts to compute; members that are at their end already go to `finished`."""
        fresh: list[RunningTrajectory] = []
        waiting: list[Waiting] = []
        for sample in group.samples:
            trajectory = self.bounds.begin(stream, group, sample, matcher)
            if finish := self.bounds.ended(trajectory):
                self.finished.append((trajectory, finish))
            elif trajectory.prefix.token_ids:
                waiting.append(Waiting(trajectory.context_ids(), [trajectory], adapter=stream.adapter))
            else:
                fresh.append(trajectory)
        if fresh:
            waiting.insert(0, Waiting(list(group.prompt_ids), fresh, adapter=stream.adapter))
        return waiting


Fits = Callable[[list[int], int], bool]
"""Whether memory has room for rows that come to these lengths, beside a kept prompt's tokens."""


@dataclass(frozen=True, eq=False)
class Admission:
    """Members of one context that get rows now."""

    waiting: Waiting
    members: list[RunningTrajectory]

    @property
    def images(self) -> tuple[ImageAt, ...]:
        """Of the prompt."""
        return self.members[0].images


class JoinQueue:
    """Waiting contexts in order."""

    def __init__(self, rows: int, prefill_tokens: int) -> None:
        self._waiting: deque[Waiting] = deque()
        self._rows = rows
        self._prefill_tokens = prefill_tokens

    def __len__(self) -> int:
        return sum(len(waiting.members) for waiting in self._waiting)

    def streams(self) -> set[Stream]:
        """Whose samples wait."""
        return {waiting.members[0].stream for waiting in self._waiting}

    def add(self, waiting: list[Waiting]) -> None:
        """Appends contexts."""
        self._waiting.extend(waiting)

    def begin_again(self, running: list[Waiting]) -> None:
        """Other weights: what was computed for those that wait is void, and what ran waits before them."""
        for waiting in self._waiting:
            waiting.keys = waiting.hidden_D = None
        self._waiting.extendleft(reversed(running))

    def take(self, running: list[int], fits: Fits) -> list[Admission]:
        """Contexts to join now; those that must be computed fit the token budget, one always does.

        `running` has the lengths that the running rows may come to. Where nothing runs one sample is taken, whatever
        `fits` says of it.
        """
        taken: list[Admission] = []
        lengths, longest = list(running), 0
        while self._waiting:
            head = self._waiting[0]
            longest = max(longest, 0 if head.keys else len(head.context_ids))
            if taken and longest * (len(taken) + 1) > self._prefill_tokens:
                break
            count = self._fitting(head, lengths, fits)
            if not count:
                break
            members, head.members = head.members[:count], head.members[count:]
            lengths += [member.full_length for member in members]
            taken.append(Admission(head, members))
            if head.members:
                break
            self._waiting.popleft()
        return taken

    def _fitting(self, head: Waiting, lengths: list[int], fits: Fits) -> int:
        """How many of a context's members may join rows that come to `lengths`."""
        if len(lengths) >= self._rows:
            return 0
        count = min(len(head.members), self._rows - len(lengths))
        while count:
            more = [member.full_length for member in head.members[:count]]
            # Members that wait need their prompt again.
            kept = len(head.context_ids) if count < len(head.members) else 0
            if fits([*lengths, *more], kept):
                break
            count -= 1
        return count or int(not lengths)

    def remove(self, wanted: Callable[[RunningTrajectory], bool]) -> list[RunningTrajectory]:
        """Takes out the samples that `wanted` names."""
        gone = [member for waiting in self._waiting for member in waiting.members if wanted(member)]
        for waiting in self._waiting:
            waiting.members = [member for member in waiting.members if not wanted(member)]
        self._waiting = deque(waiting for waiting in self._waiting if waiting.members)
        return gone

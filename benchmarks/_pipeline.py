"""The arithmetic of a two-stage pipeline: when a step could have ended, and how much of that was reached.

Works on times that were measured elsewhere, in seconds. Knows no services.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import inf
from statistics import median
from typing import Any


@dataclass
class StepTimes:
    """One step as the event log tells it. By prompt: when its group settled, and its work in trained tokens."""

    step: int
    opened: float
    settled: dict[int, float] = field(default_factory=dict)
    work: dict[int, float] = field(default_factory=dict)
    lengths: dict[tuple[int, int], int] = field(default_factory=dict)
    accumulated: float = 0.0
    committed: float = 0.0

    @property
    def wall(self) -> float:
        """From the step's opening to its commit."""
        return self.committed - self.opened

    @property
    def generate(self) -> float:
        """Until the last group was generated and scored."""
        return max(self.settled.values()) - self.opened

    @property
    def drain(self) -> float:
        """From the last settled group to the last accumulated one; all of learning in a step that `waited`."""
        return self.accumulated - max(self.settled.values())

    @property
    def commit(self) -> float:
        """From the last accumulated group to the recorded version."""
        return self.committed - self.accumulated

    def waited(self, commit_s: float) -> StepTimes:
        """Of an algorithm with a batch barrier: the commit learns, and takes `commit_s` behind that."""
        return replace(self, accumulated=max(self.committed - commit_s, *self.settled.values()))


def read_steps(events: Iterable[Mapping[str, Any]]) -> list[StepTimes]:
    """Committed steps from the coordinator's events of one run, as JSON objects in order."""
    steps: list[StepTimes] = []
    rewards: dict[int, list[float]] = {}
    now: StepTimes | None = None
    for event in events:
        kind, at = event["type"], event["at"]
        if kind == "StepOpened":
            now, rewards = StepTimes(event["step"], at), {}
        if now is None:
            continue
        if kind == "SlotsFinished":
            now.lengths.update({(p, s): tokens for p, s, _, _, tokens in event["slots"]})
        elif kind == "GroupsSettled":
            for prompt, values in event["groups"]:
                now.settled[prompt], rewards[prompt] = at, values
        elif kind == "GroupsAccumulated":
            now.accumulated = at
        elif kind == "StepCommitted":
            now.committed = at
            now.work = _work(now.lengths, rewards)
            steps.append(now)
            now = None
    return steps


@dataclass(frozen=True)
class Contention:
    """How many times as long each stage takes while the other core does the other stage's work; at least 1."""

    generate: float = 1.0
    learn: float = 1.0

    @classmethod
    def of(cls, alone: Sequence[StepTimes], beside: Sequence[StepTimes]) -> Contention:
        """From steps that waited for their batch, with the other core idle and at the other stage's work."""
        generate = median(step.generate for step in beside) / median(step.generate for step in alone)
        learn = median(step.drain for step in beside) / median(step.drain for step in alone)
        return cls(max(1.0, generate), max(1.0, learn))


ALONE = Contention()
"""Cores that do not disturb each other."""


def ideal_end(ready: Sequence[float], work: Sequence[float], contention: Contention = ALONE) -> float:
    """When a learner that takes groups as they get ready, and is never idle while one is, has done them all.

    No order ends sooner (one machine with release dates), so this is the pipeline's bound: the fill is the time to the
    first group, the drain what is left after the last. `ready` and `work` are seconds of a stage that is alone; each
    stage is slower while the other one is at work too.
    """
    groups = sorted(zip(ready, work, strict=True))
    end = generated = backlog = 0.0
    while groups or backlog:
        both = bool(groups) and backlog > 0
        generating, learning = (contention.generate, contention.learn) if both else (1.0, 1.0)
        arrives = (groups[0][0] - generated) * generating if groups else inf
        learned = backlog * learning if backlog else inf
        if arrives <= learned:
            end, generated = end + arrives, groups[0][0]
            backlog = max(0.0, backlog - arrives / learning) + groups.pop(0)[1]
        else:
            end, generated, backlog = end + learned, generated + learned / generating, 0.0
    return end


def ideal_wall(waiting: StepTimes, contention: Contention = ALONE) -> float:
    """The bound on a step's wall time, from the stages of the step that waited for its batch.

    Its learning time is shared out to the groups by their trained tokens; the commit comes on top.
    """
    total = sum(waiting.work.values())
    prompts = sorted(waiting.settled)
    ready = [waiting.settled[prompt] - waiting.opened for prompt in prompts]
    learn = [waiting.drain * waiting.work[prompt] / total for prompt in prompts]
    return ideal_end(ready, learn, contention) + waiting.commit


def overlap_share(waited: float, streamed: float, ideal: float) -> float:
    """How much of what overlapping could save was saved: 0 as slow as waiting, 1 at the bound."""
    if ideal >= waited:
        raise ValueError(f"nothing can overlap: the bound, {ideal:g} s, is not below {waited:g} s")
    return (waited - streamed) / (waited - ideal)


def _work(lengths: Mapping[tuple[int, int], int], rewards: Mapping[int, list[float]]) -> dict[int, float]:
    # A group whose rewards are all equal has no gradient: the trainer skips its forward.
    return {
        prompt: float(sum(count for (owner, _), count in lengths.items() if owner == prompt))
        if len(set(values)) > 1
        else 0.0
        for prompt, values in rewards.items()
    }

"""The simulated cluster with what a measured static run says of itself: what steps should take, with moves and without.

Profiles come from steps in turns of two sizes (generation, learning on both cores, switches, the rest) and from
pipelined steps (generation and learning on one core each, side by side). Nothing is taken from the elastic run but its
answers' lengths. Starts nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from statistics import fmean, median

from _elastic_bound import least
from headrace_coordinator.run.step.tail import MIN_GAIN, MIN_HOLD_S
from headrace_planner import (
    DeviceKind,
    Edge,
    Granularity,
    Leaf,
    Lengths,
    Profile,
    Share,
    Split,
    Sync,
    Workflow,
    Workload,
)
from headrace_planner.cluster import simulate, simulate_elastic
from headrace_planner.cluster.sampling import Draws
from headrace_planner.elastic.outlook import MoveCosts
from headrace_planner.profiling.measured import group_correlation

DEVICES, HANDS = 2, 2
"""Cores, and how often they change hands in a step in turns."""


@dataclass(frozen=True)
class Measured:
    """One step: its seconds, those of its stages, and its answers, group after group: tokens, and whether learned from.

    Equal rewards in a group leave nothing to learn. No `learned` at all: everything is.
    """

    wall_s: float
    stage_s: dict[str, float]
    tokens: tuple[int, ...]
    learned: tuple[bool, ...] = ()

    @property
    def weights(self) -> list[int]:
        """Tokens that are learned, by answer."""
        learned = self.learned or (True,) * len(self.tokens)
        return [tokens * own for tokens, own in zip(self.tokens, learned, strict=True)]

    def groups(self, size: int) -> list[tuple[int, ...]]:
        """Tokens of the answers of each group of so many."""
        return [self.tokens[at : at + size] for at in range(0, len(self.tokens), size)]

    def seconds(self, stage: str) -> float:
        """Of a stage; 0 where the step had none."""
        return self.stage_s.get(stage, 0.0)


class Model:
    """Profiles of static steps. `small`: steps in turns with fewer answers, so that the decoding pace has two parts."""

    def __init__(
        self, turns: Sequence[Measured], small: Sequence[Measured], apart: Sequence[Measured], group: int
    ) -> None:
        self._group = group
        everything = sorted(float(tokens) for step in turns for tokens in step.tokens)
        alike = group_correlation([each for step in turns for each in step.groups(group)])
        self._lengths = Lengths(tuple(everything), alike, group)
        mean = self._lengths.mean
        fixed, each = decoding(
            [*((step, DEVICES) for step in (*turns, *small)), *((step, 1) for step in apart)]
        )
        alone = median(step.seconds("learn") / sum(step.tokens) for step in apart)
        both = median(step.seconds("learn") / sum(step.tokens) for step in turns)
        switch = median(step.seconds("switch") for step in turns) / HANDS
        rest = [step.wall_s - sum(map(step.seconds, ("generate", "learn", "switch"))) for step in turns]
        self._rest = max(0.0, median(rest))
        self._rest_apart = median(step.seconds("sync") + step.seconds("protocol") for step in apart)
        self._profiles = {
            "generate": Profile("generate", "cpu", fixed_s=fixed * mean, item_s=each * mean, lengths=self._lengths,
                                load_s=switch / 2, offload_s=switch / 2),
            "learn": Profile("learn", "cpu", item_s=alone * mean,
                             scaling_loss=min(max(1 + log(both / alone) / log(DEVICES), 0.0), 0.99),
                             load_s=switch / 2, offload_s=switch / 2),
        }  # fmt: skip
        self._costs = MoveCosts(
            notice_s=switch,
            gradient_bytes=switch,
            link_bytes_per_s=1.0,  # seconds are known here, and no bytes
            resume_item_s=0.0,  # the built-in engine's answers move with their caches
            helper_item_s=alone * mean,
            min_gain=MIN_GAIN,
            min_hold_s=max(MIN_HOLD_S, switch),
        )

    def step_s(self, mode: str, steps: Sequence[Measured]) -> float:
        """Mean seconds of the steps in a mode of `_elastic_here.py`, simulated with their own lengths."""
        given, work = self._draws(steps), self._workload(len(steps[0].tokens))
        count = len(given)
        both = Share((Leaf("generate", "cpu", DEVICES), Leaf("learn", "cpu", DEVICES)))
        if mode == "elastic turns":
            return simulate_elastic(work, both, self._costs, count, given=given).step_s
        if mode == "collocated":
            return simulate(work, both, count, given=given).step_s
        groups = len(steps[0].tokens) // self._group
        apart = Split(Leaf("generate", "cpu", 1), Leaf("learn", "cpu", 1), chunks=groups)
        if mode == "elastic apart":
            return simulate_elastic(work, apart, self._costs, count, given=given).step_s
        return simulate(work, apart, count, given=given).step_s

    def bound_s(self, steps: Sequence[Measured]) -> float:
        """Mean seconds of the steps that no policy can beat, by `_elastic_bound.least`."""
        work, helper_s = self._workload(len(steps[0].tokens)), self._costs.helper_item_s
        return fmean(least(work, each, helper_s) for each in self._draws(steps))

    def _draws(self, steps: Sequence[Measured]) -> list[Draws]:
        def shares(tokens: Sequence[int], factor: float = 1.0) -> list[float]:
            return [each * factor / self._lengths.mean for each in tokens]

        # The policy knows the mean pace of learning alone, and not which groups leave nothing to learn.
        factor = sum(sum(step.tokens) for step in steps) / sum(sum(step.weights) for step in steps)
        return [Draws({"generate": shares(step.tokens)}, shares(step.weights, factor)) for step in steps]

    def _workload(self, items: int) -> Workload:
        edges = (Edge("generate", "learn", Granularity.GROUP),)
        workflow = Workflow("grpo", ("generate", "learn"), edges, (("learn", "generate"),), self._group)
        sync = Sync(between_s=self._rest_apart, same_s=self._rest)
        return Workload(workflow, self._profiles, {"cpu": DeviceKind(DEVICES)}, items, sync)


def decoding(steps: Sequence[tuple[Measured, int]]) -> tuple[float, float]:
    """Seconds of a token round, and of one more answer in it: least squares over steps and the cores that decoded.

    Neither is below 0.
    """
    rows = [
        (float(max(step.tokens)), sum(step.tokens) / cores, step.seconds("generate")) for step, cores in steps
    ]
    aa, bb = fmean(a * a for a, _, _ in rows), fmean(b * b for _, b, _ in rows)
    ab = fmean(a * b for a, b, _ in rows)
    at, bt = fmean(a * t for a, _, t in rows), fmean(b * t for _, b, t in rows)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        fixed, each = (at * bb - bt * ab) / determinant, (bt * aa - at * ab) / determinant
        if fixed >= 0 and each >= 0:
            return fixed, each
    alone = [(at / aa, 0.0), (0.0, bt / bb)]
    return min(alone, key=lambda law: sum((law[0] * a + law[1] * b - t) ** 2 for a, b, t in rows))

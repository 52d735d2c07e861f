"""Measures the pace of a run's own steps, for the elastic policy.

Knows no instance and decides nothing. Times are seconds on one clock, lengths are tokens.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Sequence
from statistics import fmean, median

from headrace_planner.elastic.outlook import MoveCosts, Terms
from headrace_planner.profiling.lengths import Lengths
from headrace_planner.profiling.measured import group_correlation
from headrace_planner.profiling.profiles import Profile

FEWEST, LENGTHS_KEPT, POINTS_KEPT = 8, 1024, 512
"""Fewest answers from which a pace is fitted; how many of the newest lengths, and points of the fit, are kept."""
GROUPS_KEPT = 128
"""Newest groups from which the correlation of lengths in a group is fitted; before there are FEWEST it counts as 1."""
PIECES_KEPT = 256
"""How many of the newest pieces that helpers learned are kept."""
SMALL_PART = 0.25
"""A step of fewer tokens, as a part of the largest step that the trainer group has learned, is not measured."""
MOST_BESIDE = 2.0
"""Decoding beside helpers counts as slower, or faster, by at most this factor: a tail of few tokens says little."""
MIN_GAIN = 0.05
MIN_HOLD_S = 0.25
FORWARD = 1 / 3
"""The forward pass's part of what a token takes to learn: a moved answer's tokens are computed once more."""

Finish = tuple[float, int]
"""(seconds since the replica began, tokens) of one answer."""


class _Repeated:
    """A quantity that is measured again and again, such as the seconds of one kind of change.

    Its median is 0 until there were two measurements: the first one, which includes what is done once, would make the
    change look too expensive to try again.
    """

    def __init__(self) -> None:
        self._seen = 0
        self._kept: deque[float] = deque(maxlen=8)

    def add(self, value: float) -> None:
        """Adds a measurement; the first one is not kept."""
        self._seen += 1
        if self._seen > 1:
            self._kept.append(value)

    @property
    def median(self) -> float:
        """Median of the newest measurements; 0 while there are none."""
        return median(self._kept) if self._kept else 0.0


class Tail:
    """The pace of one run over all of its steps; each figure is the median, or the newest, of its measurements."""

    fewest_steps = 2
    """Steps that are measured before there are terms: the first one includes what is done once."""

    def __init__(self) -> None:
        self._points: deque[tuple[float, float, float]] = deque(maxlen=POINTS_KEPT)
        self._lengths: deque[int] = deque(maxlen=LENGTHS_KEPT)
        self._groups: deque[tuple[int, ...]] = deque(maxlen=GROUPS_KEPT)
        self._alike: float | None = None
        self._prompts: deque[int] = deque(maxlen=LENGTHS_KEPT)
        self._learned: deque[tuple[float, int]] = deque(maxlen=8)
        self._step_tokens = 0  # of the largest part of a step that the trainer group learned
        self._helped: deque[tuple[float, int]] = deque(maxlen=PIECES_KEPT)
        self.joined = _Repeated()
        """Seconds from the decision to move a device until it helped."""
        self.contributed = _Repeated()
        """Seconds to take a helper's gradient."""
        self.switched = _Repeated()
        """Seconds from the end of decoding until the trainer group had the devices."""
        self.borrowed = _Repeated()
        """Seconds from the decision that the trainer group's devices decode until they could."""
        self._beside = _Repeated()
        """Seconds of tails beside helpers, over the seconds that were expected."""
        self._moved: deque[bool] = deque(maxlen=LENGTHS_KEPT)
        """Whether the newest answers that moved had to be computed again."""
        self._finished: dict[str, list[Finish]] = {}
        self._began = math.inf

    # --- what is measured

    def begin(self, now: float) -> None:
        """The rollouts begin a step, all at once."""
        self._finished, self._began, self._alike = {}, now, None

    def finished(self, replica: str, tokens: int, now: float, prompt: int = 0) -> None:
        """An answer of the step is finished; its prompt has `prompt` tokens."""
        if now >= self._began:
            self._prompts.append(prompt)
            self._finished.setdefault(replica, []).append((now - self._began, tokens))

    def grouped(self, tokens: Sequence[int]) -> None:
        """All answers of a group have their rewards."""
        self._groups.append(tuple(tokens))

    def end(self, *, moved: bool) -> None:
        """All answers of the step are finished. Where devices have `moved`, only the lengths are used."""
        replicas, self._finished, self._began = self._finished, {}, math.inf
        self._lengths.extend(tokens for each in replicas.values() for _, tokens in each)
        for finished in () if moved else replicas.values():
            lengths = sorted(tokens for _, tokens in finished)
            sums = [0]
            for length in lengths:
                sums.append(sums[-1] + length)
            for index, (seconds, tokens) in enumerate(sorted(finished, key=lambda point: point[1])):
                together = sums[index + 1] + (len(lengths) - index - 1) * tokens
                self._points.append((seconds, float(tokens), float(together)))

    def learned(self, seconds: float, tokens: int, devices: int) -> None:
        """The trainer group learned its part of a step on this number of devices."""
        self._step_tokens = max(self._step_tokens, tokens)
        # A few tokens that helpers left would measure what is done once a step, not the pace.
        if seconds > 0 and tokens > SMALL_PART * self._step_tokens:
            self._learned.append((seconds / tokens, max(1, devices)))

    def helped(self, seconds: float, tokens: int) -> None:
        """A helper learned groups on its device."""
        if tokens and seconds > 0:
            self._helped.append((seconds, tokens))

    def moved(self, *, cached: bool) -> None:
        """A begun answer goes on elsewhere, with its cache or without."""
        self._moved.append(not cached)

    def tailed(self, seconds: float, expected_s: float) -> None:
        """Seconds from a step's last move to a helper until all was decoded, and those expected by the pace without."""
        if seconds > 0 and expected_s > 0:
            self._beside.add(seconds / expected_s)

    # --- what follows

    @property
    def begun(self) -> bool:
        """Whether enough steps were measured for devices to move."""
        return len(self._learned) >= self.fewest_steps

    @property
    def longest(self) -> int:
        """Tokens of the longest finished answer of the open step; others will be about as long."""
        return max((tokens for each in self._finished.values() for _, tokens in each), default=0)

    @property
    def mean(self) -> float:
        """Mean length of an answer, in tokens; at least 1."""
        return max(1.0, sum(self._lengths) / max(1, len(self._lengths)))

    def helper_s(self, tokens: int) -> float:
        """Seconds that a helper takes for groups with these tokens, at the mean pace of the helpers so far.

        A few pieces say little, because groups of equal rewards leave nothing to learn: until helpers have learned the
        tokens of one step, the rest of these counts at the trainer group's seconds a token times its devices.
        """
        if not self._learned:
            return 0.0
        owners = median(each * devices for each, devices in self._learned)
        spent, helped = (sum(each) for each in zip(*self._helped, strict=True)) if self._helped else (0.0, 0)
        missing = max(0, self._step_tokens - helped)
        return tokens * (owners * missing + spent) / (missing + helped)

    def terms(self, owners: int, group_size: int, *, shared: bool) -> Terms | None:
        """What the policy decides by; None before enough was measured. `owners`: devices of the trainer group.

        `shared`: the trainer group learns once answers are complete, and not while others decode.
        """
        if len(self._points) < FEWEST or not self.begun:
            return None
        fixed, each = _fit(self._points)
        if fixed + each <= 0:
            return None
        values = tuple(float(max(1, length)) for length in sorted(self._lengths))
        lengths = Lengths(values, self._correlation(group_size), group_size)
        join_s = self.joined.median
        costs = MoveCosts(
            notice_s=join_s,
            gradient_bytes=self.contributed.median,
            link_bytes_per_s=1.0,  # The policy divides bytes by a rate: here the seconds are measured.
            resume_item_s=FORWARD
            * self.helper_s(1)
            * self.mean
            * (fmean(self._moved) if self._moved else 1.0),
            prompt=fmean(self._prompts) / self.mean,
            helper_item_s=self.helper_s(1) * self.mean,
            min_gain=MIN_GAIN,
            min_hold_s=max(MIN_HOLD_S, join_s),
        )
        return Terms(
            Profile(
                "generate",
                fixed_s=fixed * self.mean,
                item_s=each * self.mean,
                lengths=lengths,
                load_s=self.borrowed.median,
            ),
            # Where both sides have devices, the measured seconds of a change include the notice.
            self._learn(owners, 0.0 if shared else join_s),
            group_size,
            owners,
            shared=shared,
            costs=costs,
            beside=min(max(self._beside.median or 1.0, 1 / MOST_BESIDE), MOST_BESIDE),
        )

    def _correlation(self, size: int) -> float:
        """Correlation of the lengths in a group; fitted once a step, and only when it is needed."""
        if self._alike is None:
            whole = [group for group in self._groups if len(group) == size]
            self._alike = group_correlation(whole) if len(whole) >= FEWEST else 1.0
        return self._alike

    def _learn(self, owners: int, notice_s: float) -> Profile:
        """Seconds of a mean answer on one device, and what a group of devices loses against it."""
        together = self.mean * median(each for each, _ in self._learned)
        alone = self.helper_s(1) * self.mean
        loss = 0.0
        if owners > 1:
            loss = 1 + math.log(together / alone) / math.log(owners)
        return Profile(
            "learn",
            item_s=alone,
            scaling_loss=min(max(loss, 0.0), 0.99),
            load_s=max(0.0, self.switched.median - notice_s),
        )


def _fit(points: Sequence[tuple[float, float, float]]) -> tuple[float, float]:
    """Least squares of seconds = fixed * tokens + each * tokens of all that decoded beside, neither below 0."""
    aa = sum(a * a for _, a, _ in points)
    ab = sum(a * b for _, a, b in points)
    bb = sum(b * b for _, _, b in points)
    ta = sum(t * a for t, a, _ in points)
    tb = sum(t * b for t, _, b in points)
    determinant = aa * bb - ab * ab
    if determinant > 1e-9 * aa * bb:
        fixed, each = (ta * bb - tb * ab) / determinant, (tb * aa - ta * ab) / determinant
        if fixed >= 0 and each >= 0:
            return fixed, each
    # One of the two costs alone explains the points: the one with the smaller error.
    alone = [(ta / aa, 0.0), (0.0, tb / bb)]
    return min(alone, key=lambda law: sum((t - law[0] * a - law[1] * b) ** 2 for t, a, b in points))

"""Which rows a group makes, which micro-batch a row goes to, and which rank computes it in which round.

A row is a prefix tree of sequences: what they have in common is one path, see `packing`. All ranks go through the same
rounds, and a round takes as long as its most expensive micro-batch: so those of a round are to cost alike. Knows no
tensors; nothing here takes Python's time for each token.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass

import numpy as np

from headrace_trainer.learning.samples import Rows, Sample

Run = tuple[int, int]
"""Numbers from the first one up to the second one, which is not among them."""


class PrefixTree:
    """The distinct prefixes of a row's sequences, parents before children."""

    def __init__(self) -> None:
        self.size = 0
        self.branches = False
        """Whether some node has two children, so that plain causal attention would be wrong."""
        self.pieces: list[tuple[Run, tuple[Run, ...]]] = []
        """Of each sequence that has made nodes: these, and its path before them."""
        self._known: list[tuple[np.ndarray, np.ndarray, tuple[Run, ...]]] = []
        self._tokens: list[np.ndarray] = [np.empty(0, np.int64)]
        self._depths: list[np.ndarray] = [np.empty(0, np.int64)]

    @property
    def tokens(self) -> np.ndarray:
        """The token of each node."""
        return np.concatenate(self._tokens)

    @property
    def depths(self) -> np.ndarray:
        """How many ancestors each node has."""
        return np.concatenate(self._depths)

    def add(self, tokens: Many[int] | np.ndarray, most: float = math.inf) -> np.ndarray | None:
        """The node of each token, making those that are not there yet; None if there would be more than `most`."""
        values = np.asarray(tokens, np.int64)
        common, along, runs = self._longest(values)
        fresh = len(values) - common
        if self.size + fresh > most:
            return None
        path = np.concatenate([along[:common], np.arange(self.size, self.size + fresh)])
        if fresh:
            made, before = (self.size, self.size + fresh), _first(runs, common)
            parent = before[-1][1] - 1 if before else -1
            follows = parent == self.size - 1
            self.branches |= not follows
            self.pieces.append((made, before))
            whole = (*before[:-1], (before[-1][0], made[1])) if before and follows else (*before, made)
            self._tokens.append(values[common:])
            self._depths.append(np.arange(common, len(values)))
            self._known.append((values, path, whole))
            self.size += fresh
        return path

    def _longest(self, values: np.ndarray) -> tuple[int, np.ndarray, tuple[Run, ...]]:
        """How many first tokens are in the tree, and the path of a sequence that begins with them, also as runs."""
        most, along = 0, np.empty(0, np.int64)
        runs: tuple[Run, ...] = ()
        for other, path, own in self._known:
            length = min(len(values), len(other))
            if length <= most or other[most] != values[most]:
                continue
            differs = values[:length] != other[:length]
            first = int(differs.argmax())
            common = first if differs[first] else length
            if common > most:
                most, along, runs = common, path, own
        return most, along, runs


def _first(runs: tuple[Run, ...], count: int) -> tuple[Run, ...]:
    """The first `count` numbers of runs, which have as many."""
    found: list[Run] = []
    for first, end in runs:
        if not count:
            break
        found.append((first, min(end, first + count)))
        count -= found[-1][1] - first
    return tuple(found)


def context(sequence: Sample) -> list[int]:
    """The tokens that must be read to predict the trained ones: the last trained one has no successor."""
    return sequence.tokens[: sequence.trained[-1]] if sequence.trained else []


@dataclass(frozen=True)
class Costs:
    """What a micro-batch costs, in nodes: those of its rows, and attention's part, which grows with a row's square.

    `square_nodes` is the length at which attention costs as much as all else. `padded`: every row of a micro-batch is
    computed as the longest one is.
    """

    square_nodes: float = math.inf
    padded: bool = True

    def of(self, lengths: np.ndarray) -> np.ndarray:
        """The cost of each row alone."""
        return np.asarray(lengths * (1.0 + lengths / self.square_nodes))

    def of_batch(self, lengths: list[int]) -> float:
        """The cost of these rows together."""
        if self.padded:
            return len(lengths) * float(self.of(np.asarray(max(lengths))))
        return float(self.of(np.asarray(lengths)).sum())


def plan_rows(sequences: list[Sample], budget: int, *, shared: bool) -> list[tuple[int, list[int]]]:
    """Splits one group's sequences into rows of at most `budget` nodes: (nodes, indices of sequences).

    A sequence longer than the budget gets a row of its own. Sequences without trained tokens are left out.
    """
    rows: list[tuple[PrefixTree, list[int]]] = []
    for index, sequence in enumerate(sequences):
        if not sequence.trained:
            continue
        tokens = np.asarray(context(sequence), np.int64)
        if not (shared and rows and rows[-1][0].add(tokens, budget) is not None):
            rows.append((PrefixTree(), []))
            rows[-1][0].add(tokens)
        rows[-1][1].append(index)
    return [(tree.size, members) for tree, members in rows]


def plan_batches(lengths: list[int], budget: int) -> list[list[int]]:
    """Puts rows into micro-batches of at most `budget` padded nodes, longest first to pad little."""
    batches: list[list[int]] = []
    longest = 0
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        if not batches or (len(batches[-1]) + 1) * longest > budget:
            batches.append([])
            longest = lengths[row]
        batches[-1].append(row)
    return batches


def plan_even(lengths: list[int], budget: int, ranks: int) -> list[list[int]]:
    """As `plan_batches`, in whole rounds of `ranks` micro-batches where there are rows for them, and even ones.

    No more micro-batches than rounds need, and the largest is smallest.
    """
    least = plan_batches(lengths, budget)
    wanted = min(-(-len(least) // ranks) * ranks, len(lengths))
    if ranks == 1 or not least:
        return least
    enough = bisect_left(range(budget), True, key=lambda size: len(plan_batches(lengths, size)) <= wanted)
    return plan_batches(lengths, enough)


def plan_balanced(lengths: list[int], budget: int, ranks: int, costs: Costs) -> list[list[list[int]]]:
    """Rounds of at most `ranks` micro-batches that cost alike, of at most `budget` nodes as `plan_batches` counts them.

    As few rounds as the budget allows. One rank waits for nobody: its micro-batches are `plan_batches`'.
    """
    even = plan_even(lengths, budget, ranks)
    if ranks == 1 or not even:
        return [[batch] for batch in even]
    rounds = -(-len(even) // ranks)
    plans = [even, _filled(lengths, budget, min(rounds * ranks, len(lengths)), costs)]
    found = [_in_rounds(plan, lengths, ranks, costs) for plan in plans if plan]
    return min(found, key=lambda plan: seconds_of(plan, lengths, costs))


def seconds_of(plan: list[list[list[int]]], lengths: list[int], costs: Costs) -> float:
    """What all rounds cost: each as much as its most expensive micro-batch."""
    return sum(max(costs.of_batch([lengths[row] for row in batch]) for batch in batches) for batches in plan)


def _filled(lengths: list[int], budget: int, bins: int, costs: Costs) -> list[list[int]]:
    """The most expensive row first, each to where the cost stays least; empty where the budget does not allow it."""
    longest, count, cost = np.zeros(bins), np.zeros(bins), np.zeros(bins)
    found: list[list[int]] = [[] for _ in range(bins)]
    for row in sorted(range(len(lengths)), key=lambda row: -lengths[row]):
        longer = np.maximum(longest, lengths[row])
        own = costs.of(np.asarray(float(lengths[row])))
        after = (count + 1) * costs.of(longer) if costs.padded else cost + own
        after[(count > 0) & ((count + 1) * longer > budget)] = math.inf
        best = int(after.argmin())
        if not math.isfinite(after[best]):
            return []
        longest[best], count[best], cost[best] = longer[best], count[best] + 1, after[best]
        found[best].append(row)
    return [batch for batch in found if batch]


def _in_rounds(
    batches: list[list[int]], lengths: list[int], ranks: int, costs: Costs
) -> list[list[list[int]]]:
    """Those that cost alike beside each other, the most expensive first."""
    priced = sorted(batches, key=lambda batch: -costs.of_batch([lengths[row] for row in batch]))
    return [priced[first : first + ranks] for first in range(0, len(priced), ranks)]


def plan_rounds(
    groups: Many[list[Sample]], budget: int, *, replicas: int, shared: bool, costs: Costs | None = None
) -> Iterator[tuple[list[Rows], set[int]]]:
    """(work of each replica, indices of the groups in it) of each round; no row has sequences of two groups."""
    rows = [
        (owner, length, [sequences[index] for index in members])
        for owner, sequences in enumerate(groups)
        for length, members in plan_rows(sequences, budget, shared=shared)
    ]
    lengths = [length for _, length, _ in rows]
    for chosen in plan_balanced(lengths, budget, replicas, costs or Costs()):
        work: list[Rows] = [[rows[row][2] for row in micro] for micro in chosen]
        work += [[] for _ in range(replicas - len(work))]
        yield work, {rows[row][0] for micro in chosen for row in micro}

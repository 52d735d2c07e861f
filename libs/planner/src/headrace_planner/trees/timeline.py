"""When each stage of a plan is predicted to run. Knows no text."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from headrace_planner.trees.costs import Evaluation
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split, devices, leaves


@dataclass(frozen=True)
class Bar:
    """A stage from `begin` to `end` (seconds), `busy` of them at work, on devices `first` to `first + count - 1`.

    `count`: devices that work; a stage with more devices than items, or between valid sizes, leaves some idle.
    """

    stage: str
    kind: str
    first: int
    count: int
    begin: float
    end: float
    busy: float


def bars(evaluation: Evaluation, tree: Node) -> list[Bar]:
    """One bar for each leaf of a tree, by their begin."""
    work = evaluation.workload
    window = _Window(0.0, evaluation.seconds(tree), 1, work.items)
    found = _lay(evaluation, tree, window, dict.fromkeys(work.devices, 0))
    return sorted(found, key=lambda bar: (bar.begin, bar.end, bar.kind, bar.first, bar.stage))


@dataclass(frozen=True)
class _Window:
    """`passes` passes of `items` items between two times."""

    begin: float
    end: float
    passes: int
    items: float


def _lay(evaluation: Evaluation, node: Node, window: _Window, offset: dict[str, int]) -> Iterator[Bar]:
    work, passes = evaluation.workload, window.passes
    match node:
        case Leaf(stage, kind, count):
            busy = passes * work.leaf_seconds(node, window.items)
            span = window.end - window.begin
            used = work.profiles[stage].used(window.items, count)
            yield Bar(stage, kind, offset[kind], used, window.begin, window.end, min(busy, span))
        case Cycle(first, second, batches, shared):
            each = _Window(window.begin, window.end, passes * batches, window.items / batches)
            if shared:
                yield from (_beside(evaluation, leaf, node, window, offset) for leaf in (first, second))
                return
            yield from _lay(evaluation, first, each, offset)
            yield from _lay(evaluation, second, each, _after(first, offset))
        case Share():
            yield from _turns(evaluation, node, window, offset)
        case Split():
            yield from _sides(evaluation, node, window, offset)


def _beside(evaluation: Evaluation, leaf: Leaf, share: Node, window: _Window, offset: dict[str, int]) -> Bar:
    """The bar of a stage whose neighbours stay loaded, spread over a window."""
    busy = window.passes * evaluation.leaf_beside(leaf, share, window.items)
    busy = min(busy, window.end - window.begin)
    used = evaluation.workload.profiles[leaf.stage].used(window.items, leaf.devices)
    return Bar(leaf.stage, leaf.kind, offset[leaf.kind], used, window.begin, window.end, busy)


def _turns(evaluation: Evaluation, share: Share, window: _Window, offset: dict[str, int]) -> Iterator[Bar]:
    begin, items = window.begin, window.items
    for child in share.children:
        own = window
        if (
            window.passes == 1
        ):  # else turns of every pass follow one another, and each stage is spread over the window
            stages = [leaf.stage for leaf in leaves(child)]
            seconds = sum(evaluation.leaf_beside(leaf, share, items) for leaf in leaves(child))
            load = 0.0
            if not share.resident:
                seconds, load = evaluation.seconds(child, items), evaluation.workload.turn_seconds(stages) / 2
            own = _Window(begin + load, begin + load + seconds, 1, items)
            begin = own.end + load
        if share.resident:
            yield from (_beside(evaluation, leaf, share, own, offset) for leaf in leaves(child))
        else:
            yield from _lay(evaluation, child, own, offset)


def _sides(evaluation: Evaluation, split: Split, window: _Window, offset: dict[str, int]) -> Iterator[Bar]:
    work, chunks = evaluation.workload, split.chunks
    first, second = evaluation.units(split.first), evaluation.units(split.second)
    beside = work.chunk_limit(first, second) is None
    streams = work.source(first) is None
    piece = _Window(window.begin, window.end, window.passes * chunks, window.items / chunks)
    ahead = piece if streams else _Window(window.begin, window.end, window.passes, window.items)
    behind = piece
    if window.passes == 1 and not beside:
        until, times = evaluation.produced(split, window.items)
        done = window.end - work.sync_seconds(first, second, window.items, between=True)
        ahead = _Window(window.begin, window.begin + until, ahead.passes, ahead.items)
        behind = _Window(min(window.begin + times[0] * until, done), done, behind.passes, behind.items)
    yield from _lay(evaluation, split.first, ahead, offset)
    yield from _lay(evaluation, split.second, behind, _after(split.first, offset))


def _after(node: Node, offset: dict[str, int]) -> dict[str, int]:
    return {kind: first + devices(node).get(kind, 0) for kind, first in offset.items()}

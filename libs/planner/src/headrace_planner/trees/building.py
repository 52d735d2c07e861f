"""The plan tree of what a search has found. Decides nothing."""

from __future__ import annotations

from collections.abc import Iterator

from headrace_planner.trees.divisions import Counts
from headrace_planner.trees.search import Found, Search
from headrace_planner.trees.tree import Cycle, Leaf, Node, Share, Split


def build(search: Search, units: int, counts: Counts, items: float, given: Counts | None = None) -> Node:
    """The tree of `search.best`. `given`: devices that may exceed `counts` by what the ladder rounded off."""
    return _node(search, search.best(units, counts, items), units, items, counts, given or counts)


def _node(search: Search, found: Found, units: int, items: float, counts: Counts, given: Counts) -> Node:
    match found.shape:
        case "leaf":
            return search.leaf(search.stages(units)[0], given)
        case "resident":
            return Share(
                tuple(_loaded(search, unit, given) for unit in _in_order(search, units)), resident=True
            )
        case "shared cycle":
            return _loaded(search, units, given)
        case "cycle":
            mine, theirs = _with_rest(found, given)
            left, right = search.stages(units)
            return Cycle(search.leaf(left, mine), search.leaf(right, theirs), found.chunks)
        case "offloaded":
            return Share(tuple(_turns(search, found, items, counts, given)))
    return _split(search, found, items, given)


def _split(search: Search, found: Found, items: float, given: Counts) -> Split:
    first, second = found.cut
    passes = 1 if search.work.source(first) else found.chunks
    mine, theirs = _with_rest(found, given)
    return Split(
        build(search, first, found.counts[0], items / passes, mine),
        build(search, second, found.counts[1], items / found.chunks, theirs),
        found.chunks,
    )


def _turns(search: Search, found: Found, items: float, counts: Counts, given: Counts) -> Iterator[Node]:
    first, second = found.cut
    yield _node(search, search.unshared(first, counts, items), first, items, counts, given)
    plain, rest = search.unshared(second, counts, items), search.offloaded(second, counts, items)
    if rest.seconds < plain.seconds + search.work.turn_seconds(search.stages(second)):
        yield from _turns(search, rest, items, counts, given)
    else:
        yield _node(search, plain, second, items, counts, given)


def _with_rest(found: Found, given: Counts) -> tuple[Counts, Counts]:
    """Each side's devices; what the ladder rounded off goes to the second side."""
    mine, theirs = found.counts
    return mine, tuple(total - a if b else 0 for a, b, total in zip(mine, theirs, given, strict=True))


def _loaded(search: Search, unit: int, counts: Counts) -> Leaf | Cycle:
    made = [search.leaf(stage, counts) for stage in search.stages(unit)]
    return made[0] if len(made) == 1 else Cycle(made[0], made[1], shared=True)


def _in_order(search: Search, units: int) -> list[int]:
    """Single units of a set, producers before consumers."""
    order: list[int] = []
    while units & (units - 1):
        first = next(first for first, _ in search.work.workflow.cuts(units) if first & (first - 1) == 0)
        order.append(first)
        units &= ~first
    return [*order, units]

"""What admitted runs leave so that a waiting one can start: as little as lets it start.

Knows no run's rules: what each of them may leave, and whether the waiting one then fits, come with the question.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

from headrace_coordinator.domain.runs import Grant

Offers = Mapping[str, Sequence[Grant | None]]
"""Id of a run → what it may hold in place of its grant, from the most to the least; None, the last: nothing."""


def least_room(
    grants: Mapping[str, Grant], offers: Offers, fits: Callable[[dict[str, Grant]], bool]
) -> dict[str, Grant | None]:
    """Id of each run that leaves something → what it keeps; empty where no offers let the waiting run start.

    Smaller groups are taken before whole runs, and each in the order of `offers`.
    """
    left: dict[str, Grant | None] = {}
    for whole in (False, True):
        for name, kept in offers.items():
            least = [grant for grant in kept if whole or grant is not None][-1:]
            if not least or (whole and least[0] is not None):
                continue
            left[name] = least[0]
            if fits(_beside(grants, left)):
                return _most_kept(grants, offers, left, fits)
    return {}


def _most_kept(
    grants: Mapping[str, Grant],
    offers: Offers,
    left: dict[str, Grant | None],
    fits: Callable[[dict[str, Grant]], bool],
) -> dict[str, Grant | None]:
    """Each run keeps the most with which the waiting one still fits; those that would leave everything first."""
    for name in sorted(left, key=lambda name: left[name] is not None):
        for kept in (grants[name], *offers[name]):
            if fits(_beside(grants, left | {name: kept})):
                left[name] = kept
                break
    return {name: kept for name, kept in left.items() if kept != grants[name]}


def _beside(grants: Mapping[str, Grant], left: Mapping[str, Grant | None]) -> dict[str, Grant]:
    return {name: grant for name, grant in {**grants, **left}.items() if grant is not None}

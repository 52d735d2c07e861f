"""Which rollout instances make one engine where engines span hosts: the first of them leads, one of each host."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Protocol, TypeVar


class OnHost(Protocol):
    """A rollout instance, by its process and its host."""

    incarnation: str
    host: str


Member = TypeVar("Member", bound=OnHost)


def engine_groups(
    instances: Sequence[Member], hosts: int, known: Iterable[Sequence[str]] = ()
) -> list[list[Member]]:
    """Groups of `hosts` instances on different hosts, in their order; what makes no whole group is left out.

    `known`: groups by incarnations, which stay as they are while all their members are there.
    """
    if hosts == 1:
        return [[each] for each in instances]
    there = {each.incarnation: each for each in instances}
    whole = [group for group in known if len(group) == hosts and {*group} <= there.keys()]
    groups = [[there[who] for who in group] for group in whole]
    taken = {each.incarnation for group in groups for each in group}
    open_groups: list[list[Member]] = []
    for instance in instances:
        if instance.incarnation in taken:
            continue
        fitting = (group for group in open_groups if instance.host not in {each.host for each in group})
        group = next(fitting, None)
        if group is None:
            open_groups.append(group := [])
        group.append(instance)
        if len(group) == hosts:
            open_groups.remove(group)
            groups.append(group)
    return groups

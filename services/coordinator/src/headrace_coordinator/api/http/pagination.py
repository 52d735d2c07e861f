"""Pages of lists. A token names the last entry shown, so that new entries never shift a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace_schema.problems import problem

from headrace_coordinator.api.http.errors import invalid
from headrace_coordinator.api.refusal import Refused

Item = TypeVar("Item")


def foreign_token(token: str) -> Refused:
    """The refusal of a token that this list did not give, or whose entry is gone."""
    reason = f"{token[:40]!r} names no entry of this list"
    return invalid([problem("page_token", reason, "take next_page_token of a page, or begin without one")])


def page(
    items: Sequence[Item],
    key: Callable[[Item], str],
    size: int,
    token: str,
    wanted: Callable[[Item], bool] = lambda _: True,
) -> tuple[list[Item], str]:
    """(entries, token of the next page) of the `wanted` entries of a list whose entries have unique keys.

    A token stays valid when its entry is wanted no more.
    """
    start = 0
    if token:
        last = next((index for index, item in enumerate(items) if key(item) == token), None)
        if last is None:
            raise foreign_token(token)
        start = last + 1
    found = [item for item in items[start:] if wanted(item)]
    shown = found[:size]
    return shown, key(shown[-1]) if len(found) > size else ""


def place_of(token: str) -> int:
    """The position that a token of a list of past entries names; -1 before the first."""
    if not token:
        return -1
    if not (token.isascii() and token.isdigit() and len(token) < 20):
        raise foreign_token(token)
    return int(token)


def token_of(place: int | str | None) -> str:
    """The token of the next page; empty at the end."""
    return "" if place is None else str(place)

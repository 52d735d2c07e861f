"""Pages of lists. A token names the last entry shown, so that new entries never shift a page."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from headrace_schema.problems import problem

from headrace_coordinator.api.control import Refused
from headrace_coordinator.api.http.errors import invalid

Item = TypeVar("Item")


def foreign_token(token: str) -> Refused:
    """The refusal of a token that this list did not give, or whose entry is gone."""
    reason = f"{token[:40]!r} names no entry of this list"
    return invalid([problem("page_token", reason, "take next_page_token of a page, or begin without one")])


def page(items: Sequence[Item], key: Callable[[Item], str], size: int, token: str) -> tuple[list[Item], str]:
    """(entries, token of the next page) of a list whose entries have unique keys."""
    start = 0
    if token:
        found = next((index for index, item in enumerate(items) if key(item) == token), None)
        if found is None:
            raise foreign_token(token)
        start = found + 1
    shown = list(items[start : start + size])
    return shown, key(shown[-1]) if shown and start + size < len(items) else ""


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

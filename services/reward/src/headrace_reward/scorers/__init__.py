"""The registry: built-in scorers (every sibling file) and those of entry points `headrace.scorers`.

Loaded in child processes only, so that no third party's import can harm the service.
"""

from __future__ import annotations

import difflib
import importlib
import pkgutil
from functools import cache
from importlib.metadata import entry_points

from headrace_reward.scorers.base import BUILT_IN, ScorerError, ScorerType

ENTRY_POINTS = "headrace.scorers"
_NOT_SCORERS = {"base", "user"}


@cache
def built_in() -> dict[str, ScorerType]:
    """The scorers of this package, by name."""
    for module in pkgutil.iter_modules(__path__):
        if module.name not in _NOT_SCORERS:
            importlib.import_module(f"{__name__}.{module.name}")
    return dict(sorted(BUILT_IN.items()))


def names() -> list[str]:
    """Every registered name; imports nothing of third parties."""
    return sorted({*built_in(), *(point.name for point in entry_points(group=ENTRY_POINTS))})


def find(name: str) -> ScorerType:
    """Returns a registered scorer.

    Raises:
        ScorerError: the name is unknown, or an entry point's object is no ScorerType.
    """
    if name in built_in():
        return built_in()[name]
    for point in entry_points(group=ENTRY_POINTS, name=name):
        loaded = point.load()
        if not isinstance(loaded, ScorerType):
            raise ScorerError("name", f"{name}: entry point {point.value} is no headrace_reward ScorerType")
        return loaded
    raise ScorerError("name", _unknown(name))


def _unknown(name: str) -> str:
    known = names()
    near = difflib.get_close_matches(name, known, n=1)
    hint = f"did you mean {near[0]!r}? " if near else ""
    return (
        f"there is no scorer {name!r}; {hint}known: {', '.join(known)}; "
        "your own is written path/to/file.py:function"
    )

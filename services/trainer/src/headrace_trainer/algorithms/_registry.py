"""Algorithms by name: a file of this folder or a third party's entry point, imported when it is used."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Callable
from difflib import get_close_matches
from importlib.metadata import entry_points
from typing import TYPE_CHECKING, TypeVar

from headrace_trainer.errors import invalid

if TYPE_CHECKING:
    from headrace_schema.learning import AlgorithmSection

    from headrace_trainer.algorithms._base import Algorithm

ENTRY_POINTS = "headrace.algorithms"
PACKAGE = "headrace_trainer.algorithms"

_FACTORIES: dict[str, Callable[[AlgorithmSection], Algorithm]] = {}
Factory = TypeVar("Factory", bound="Callable[[AlgorithmSection], Algorithm]")


def register(name: str) -> Callable[[Factory], Factory]:
    """Class decorator: makes an algorithm known by its name; a second one of that name is an error."""

    def keep(factory: Factory) -> Factory:
        if name in _FACTORIES:
            raise ValueError(f"algorithm {name!r} is registered twice")
        _FACTORIES[name] = factory
        return factory

    return keep


def algorithm_names() -> list[str]:
    """Names that `build_algorithm` accepts; nothing is imported to list them."""
    package = importlib.import_module(PACKAGE)
    own = {module.name for module in pkgutil.iter_modules(package.__path__) if module.name[0] != "_"}
    return sorted(own | {point.name for point in entry_points(group=ENTRY_POINTS)} | _FACTORIES.keys())


def build_algorithm(config: AlgorithmSection) -> Algorithm:
    """The algorithm that `config.name` names. Raises Refusal INVALID with the nearest name."""
    name = config.name
    if name not in _FACTORIES:
        _import(name)
    return _FACTORIES[name](config)


def _import(name: str) -> None:
    names = algorithm_names()
    if name not in names:
        near = get_close_matches(name, names, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise invalid(f"algorithm.name: no algorithm {name!r}; there are {', '.join(names)}{hint}")
    for point in entry_points(group=ENTRY_POINTS, name=name):
        point.load()
        return
    importlib.import_module(f"{PACKAGE}.{name}")

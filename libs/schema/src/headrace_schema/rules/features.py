"""A feature: which keys of a spec ask for it, and what to write to be without it. `asked` has those that there are.

A predicate reads the spec, and what a fleet has resolved of it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace_schema.images import VISION_FAMILIES
from headrace_schema.sections.learning import AlgorithmSection
from headrace_schema.sections.run import RunSections

ALL_READERS = " or ".join(VISION_FAMILIES)
"""Families that read images."""


@dataclass(frozen=True)
class Resolved:
    """A spec with what a fleet knows of it. What is left out is not known, and no row of the table judges it."""

    spec: RunSections
    engine: str = ""
    """The engine that the run takes."""
    instead: Mapping[str, Sequence[str]] = field(default_factory=dict)
    """What a plug-in of the run cannot do, as KEY:FEATURE (`rollout.engine:images`), and the names that can."""
    images: str = ""
    """Who has images, as a sentence; empty: nobody."""
    in_data: bool = False
    """It is the data that has them."""
    blind: Mapping[str, str] = field(default_factory=dict)
    """Family of each local model, by key, that does not read them."""
    readers: str = ALL_READERS
    """Families that do."""
    plain: bool = False
    """The model is known to have no experts."""
    gpus: bool = False
    """The fleet has GPUs."""
    asked: Any = None
    """`sampling` of an evaluation."""


Asked = Callable[[Resolved], Iterable[str]]


@dataclass(frozen=True)
class Feature:
    """`said` is its name for people, `asked` yields the keys that ask for it, `undo` says how to be without it.

    In `undo` {readers} are families of models that read what the run has.
    {key} is the key, {it} "it" where the sentence is about that key and the key where it is about another.
    """

    said: str
    asked: Asked
    undo: str = "remove {it}"
    needs: str = ""
    """What a plug-in would have to be able to do."""


def value_at(spec: Any, path: str) -> Any:
    """The value at a key; None where a section or an option on the way is missing."""
    for name in path.split("."):
        spec = spec.get(name) if isinstance(spec, Mapping) else getattr(spec, name, None)
    return spec


def _default(spec: Any, path: str) -> Any:
    """What a key has where the spec does not name it."""
    parent, _, name = path.rpartition(".")
    section = value_at(spec, parent) if parent else spec
    field = type(section).model_fields[name]
    made: Any = field.default_factory
    return (
        field.default if made is None else made()
    )  # get_default() looks at the factory's signature, which takes long


def when(said: str, path: str, holds: Callable[[RunSections], object], undo: str = "remove {it}") -> Feature:
    """The feature of a key by a predicate of the spec."""
    return Feature(said, lambda run: [path] if holds(run.spec) else [], undo)


def key(path: str, undo: str = "remove {it}") -> Feature:
    """That a key has another value than its default; an option: that it is set."""

    def given(spec: RunSections) -> bool:
        found = value_at(spec, path)
        parent = value_at(spec, path.rpartition(".")[0]) if "." in path else spec
        return bool(found) if isinstance(parent, Mapping | None) else found != _default(spec, path)

    return when(f"`{path}`", path, given, undo)


def value(path: str, *values: Any, undo: str) -> Feature:
    """That a key has one of some values."""
    return when(f"`{path}: {_shown(values)}`", path, lambda spec: value_at(spec, path) in values, undo)


def unlike(path: str, *values: Any, undo: str = "remove {it}") -> Feature:
    """That a key has none of some values."""
    said = f"`{path}` other than {_shown(values)}"
    return when(said, path, lambda spec: value_at(spec, path) not in values, undo)


def above(path: str, most: int, undo: str) -> Feature:
    """That a key's number is above one."""
    return when(f"`{path}` above {most}", path, lambda spec: (value_at(spec, path) or 0) > most, undo)


def missing(path: str, undo: str) -> Feature:
    """That a key is left out."""
    return when(f"no `{path}`", path, lambda spec: not value_at(spec, path), undo)


def also(what: Feature, *others: Feature, said: str = "") -> Feature:
    """A feature where the run asks for others, too."""

    def asked(run: Resolved) -> Iterable[str]:
        return what.asked(run) if all(list(each.asked(run)) for each in others) else ()

    return Feature(said or " with ".join(each.said for each in (what, *others)), asked, what.undo)


def options(said: str, holds: Callable[[Resolved, AlgorithmSection], Iterable[str]], undo: str) -> Feature:
    """Options of an algorithm, the run's or a policy's, by a predicate that yields them."""

    def asked(run: Resolved) -> Iterator[str]:
        for where, algorithm in run.spec.algorithms.items():
            yield from (f"{where}.options.{name}".rstrip(".") for name in holds(run, algorithm))

    return Feature(said, asked, undo)


def option(name: str, *values: Any, undo: str = "remove {it}") -> Feature:
    """One option of an algorithm: that it is set, or has one of some values."""

    def holds(run: Resolved, algorithm: AlgorithmSection) -> list[str]:
        given = algorithm.options.get(name)
        return [name] if (given in values if values else given) else []

    return options(f"`algorithm.options.{name}{f': {_shown(values)}' if values else ''}`", holds, undo)


def lacking(path: str, needs: str, said: str) -> Feature:
    """What a plug-in of the run cannot do, as a fleet registers it."""

    def asked(run: Resolved) -> Iterator[str]:
        for where in (each.removesuffix(f":{needs}") for each in run.instead if each.endswith(f":{needs}")):
            if where == path or where.endswith(f".{path}"):
                yield where

    return Feature(said, asked, "set {name}: {instead}", needs)


def resolved(said: str, path: str, holds: Callable[[Resolved], object], undo: str = "") -> Feature:
    """The feature of a key by what the fleet knows."""
    return Feature(said, lambda run: [path] if holds(run) else [], undo)


def _shown(values: Iterable[Any]) -> str:
    given = (each for each in values if each is not None)
    return " or ".join(str(each).lower() if isinstance(each, bool) else str(each) for each in given)

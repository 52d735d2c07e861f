"""Values between a test and its code. Objects of classes that stand before both, such as a tree's nodes, go by value.

So each side has its own class of that name, and an object that changes what it is stays on its side.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Sequence
from typing import Any

from headrace_servicekit.sandbox.inside.values import NotPlain, decode, encode

Packed = dict[str, list[Any]]
"""`values`, and `objects` among them: the name of the class and the attributes of each."""


def classes_of(namespace: dict[str, Any]) -> frozenset[str]:
    """The classes that code defined, by name."""
    return frozenset(
        name
        for name, each in namespace.items()
        if inspect.isclass(each) and each.__module__ == namespace["__name__"]
    )


class Shared:
    """One side: `names` of the classes, which `namespace` has."""

    def __init__(self, names: frozenset[str], namespace: dict[str, Any]) -> None:
        self._names, self._namespace = names, namespace

    def pack(self, values: Sequence[Any], other: Callable[[Any], Any]) -> Packed:
        """The values as JSON; `other` converts those that are neither plain nor shared."""
        found: list[Any] = []
        places: dict[int, int] = {}

        def encoded(value: Any) -> Any:
            if type(value).__name__ not in self._names or not hasattr(value, "__dict__"):
                return other(value)
            if id(value) not in places:
                places[id(value)] = len(found)
                found.append(value)
            return {"shared": places[id(value)]}

        packed = [encode(each, encoded) for each in values]
        objects = [[type(each).__name__, encode(vars(each), encoded)] for each in found]
        return {"values": packed, "objects": objects}

    def unpack(self, packed: Packed, other: Callable[[str, Any], Any]) -> list[Any]:
        """What `pack` was given on the other side. Raises NotPlain."""
        if not self._names.issuperset(name for name, _ in packed["objects"]):
            raise NotPlain("an object of a class that the question does not define")
        made = [object.__new__(self._namespace[name]) for name, _ in packed["objects"]]

        def decoded(kind: str, index: Any) -> Any:
            return made[index] if kind == "shared" else other(kind, index)

        for each, (_, attributes) in zip(made, packed["objects"], strict=True):
            vars(each).update(decode(attributes, decoded))
        return [decode(each, decoded) for each in packed["values"]]

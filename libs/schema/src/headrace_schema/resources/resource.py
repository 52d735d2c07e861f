"""What every resource of the HTTP API is: strict where the coordinator makes it, lenient where a client reads it."""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Mapping
from functools import cache
from typing import Any, Self

from pydantic import BaseModel, PrivateAttr

_ABSENT = object()


class Resource(BaseModel):
    """Something the coordinator shows."""

    _raw: dict[str, Any] = PrivateAttr(default_factory=dict)

    @property
    def raw(self) -> dict[str, Any]:
        """Its JSON as it came, with what a newer coordinator adds; empty unless made by `from_json`."""
        return self._raw

    @classmethod
    def of(cls, source: object, **given: Any) -> Self:
        """Made of the source's attributes of the same names; what is `given` comes first."""
        found = {name: getattr(source, name, _ABSENT) for name in cls.model_fields if name not in given}
        return cls(**{name: value for name, value in found.items() if value is not _ABSENT}, **given)

    @classmethod
    def from_json(cls, data: Mapping[str, Any]) -> Self:
        """Reads JSON of an older or newer coordinator, nested resources included.

        A field that is absent has its default or is empty (0, "", [], …); null in place of a number is NaN, which
        JSON lacks; keys that this version does not know are in `raw` alone.
        """
        kinds = _kinds(cls)
        known = {name: _read(kind, data[name]) for name, kind in kinds.items() if name in data}
        absent = {
            name: _empty(kinds[name])
            for name, field in cls.model_fields.items()
            if name not in known and field.is_required()
        }
        resource = cls.model_construct(**known, **absent)
        resource._raw = dict(data)
        return resource

    def __eq__(self, other: object) -> bool:
        """By fields; where it was read from does not count."""
        return type(self) is type(other) and dict(self) == dict(other)

    __hash__ = None  # type: ignore[assignment]


@cache
def _kinds(cls: type[Resource]) -> dict[str, Any]:
    hints = typing.get_type_hints(cls)
    return {name: hints[name] for name in cls.model_fields}


def _read(kind: Any, value: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        inner = next(part for part in arguments if part is not types.NoneType)
        return None if value is None else _read(inner, value)
    if value is None:
        return math.nan if kind is float else _empty(kind)
    if origin is list:
        return [_read(arguments[0], item) for item in value]
    if origin is tuple:
        return tuple(value)
    if origin is dict:
        return {arguments[0](key): _read(arguments[1], item) for key, item in value.items()}
    if isinstance(kind, type) and issubclass(kind, Resource):
        return kind.from_json(value)
    return value


def _empty(kind: Any) -> Any:
    origin = typing.get_origin(kind) or kind
    if origin in (types.UnionType, typing.Union) or origin is Any:
        return None
    return kind.from_json({}) if issubclass(origin, Resource) else origin()

"""Requests that are wrong in one place, made by reflection on the contracts, always the same for one seed."""

from __future__ import annotations

import math
import random
from collections.abc import Iterator
from typing import Any

from google.protobuf.descriptor import FieldDescriptor, MethodDescriptor
from google.protobuf.message import Message

_F = FieldDescriptor
NAUGHTY_TEXT = (
    "",
    "../../../../etc/passwd",
    "a\0b",
    "x" * 100_000,
    "\U0001f4a9" * 3000,
    "[" * 20_000,
    '{"a":' * 5_000 + "1" + "}" * 5_000,
    '{"\\ud800": 1e999}',
    "[1, 2]",
    "-1",
    "99999999999999999999",
    "²",
)
NUMBERS = {
    _F.CPPTYPE_INT32: (-1, -(2**31), 2**31 - 1),
    _F.CPPTYPE_UINT32: (2**32 - 1,),
    _F.CPPTYPE_INT64: (-1, -(2**63), 2**62, 2**63 - 1),
    _F.CPPTYPE_UINT64: (2**62, 2**64 - 1),
    _F.CPPTYPE_DOUBLE: (math.nan, math.inf, -math.inf, -1.0, 1e308),
    _F.CPPTYPE_FLOAT: (math.nan, math.inf, -math.inf, -1.0, 3e38),
    _F.CPPTYPE_BOOL: (True, False),
    _F.CPPTYPE_ENUM: (-1, 77, 2**31 - 1),
}
BYTES = (b"", b"\xff" * 100, b"\0" * 70_000)


UNDECODABLE = (b"\xff\xff\xff\xff", b"\x0a\x05ab", b"\x0b" * 200)
"""A tag without an end, a length beyond the end, groups without an end."""


def junk(seed: int, count: int) -> list[bytes]:
    """UNDECODABLE, wrong UTF-8, and `count` random strings of bytes."""
    chance = random.Random(seed)
    return [*UNDECODABLE, b"\x0a\x04\x0a\x02\xff\xfe"] + [
        chance.randbytes(chance.randint(1, 200)) for _ in range(count)
    ]


def mutants(valid: Message, seed: int, most: int) -> Iterator[tuple[str, Message]]:
    """(what was changed, message): `most` copies with one field each at a nasty value."""
    places = list(_places(type(valid)(), valid, ()))
    random.Random(seed).shuffle(places)
    for name, path, field, value in places[:most]:
        message = type(valid)()
        message.CopyFrom(valid)
        _set(_at(message, path), field, value)
        yield f"{name}={str(value)[:60]!r}", message


_Place = tuple[str, tuple[tuple[str, int], ...], FieldDescriptor, Any]


def _places(_: Message, message: Message, path: tuple[tuple[str, int], ...]) -> Iterator[_Place]:
    for field in message.DESCRIPTOR.fields:
        name = ".".join([*(part for part, _ in path), field.name])
        if field.message_type is not None and field.message_type.GetOptions().map_entry:
            continue
        if field.message_type is None:
            yield from ((name, path, field, value) for value in _values(field))
            continue
        value = getattr(message, field.name)
        if field.is_repeated:
            for index, element in enumerate(value[:1]):
                yield from _places(element, element, (*path, (field.name, index)))
            yield name, path, field, None
        elif message.HasField(field.name):
            yield from _places(value, value, (*path, (field.name, -1)))
            yield name, path, field, None


def _values(field: FieldDescriptor) -> tuple[Any, ...]:
    if field.cpp_type == _F.CPPTYPE_STRING:
        return BYTES if field.type == _F.TYPE_BYTES else NAUGHTY_TEXT
    return NUMBERS[field.cpp_type]


def _at(message: Message, path: tuple[tuple[str, int], ...]) -> Message:
    for name, index in path:
        value = getattr(message, name)
        message = value if index < 0 else value[index]
    return message


def _set(message: Message, field: FieldDescriptor, value: Any) -> None:
    if value is None:
        message.ClearField(field.name)
    elif field.is_repeated:
        elements = getattr(message, field.name)
        if elements:
            elements[0] = value
        else:
            elements.append(value)
    else:
        setattr(message, field.name, value)


def path_of(method: MethodDescriptor) -> str:
    """The path of a method in a request."""
    return f"/{method.containing_service.full_name}/{method.name}"

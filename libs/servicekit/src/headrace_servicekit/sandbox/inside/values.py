"""Plain data as JSON: what goes between the code that is judged and what judges it.

Only values of the built-in types themselves cross. So an object that is equal to everything, or changes what it is when
it is looked at, stays on its side.
"""

from __future__ import annotations

import builtins
import math
from collections.abc import Callable
from typing import Any

_SAFE_INTEGER = 1 << 53
_KINDS: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
DEEPEST = 100


class NotPlain(ValueError):
    """A value that is no plain data."""


def encode(value: Any, other: Callable[[Any], Any] | None = None, depth: int = 0) -> Any:
    """The value as JSON. Subclasses of plain types count as those; `other` converts what is not plain.

    Raises NotPlain, or whatever `other` raises.
    """
    if depth > DEEPEST:
        raise NotPlain(f"a value is nested deeper than {DEEPEST}")
    if value is None or value is True or value is False:
        return value
    if isinstance(value, str):
        return str.__str__(value)
    if isinstance(value, int):
        plain = int.__int__(value)
        return plain if -_SAFE_INTEGER < plain < _SAFE_INTEGER else {"int": hex(plain)}
    if isinstance(value, float):
        plain_float = float.__float__(value)
        return plain_float if math.isfinite(plain_float) else {"float": repr(plain_float)}
    for name, kind in _KINDS.items():
        if isinstance(value, kind):
            return {name: [encode(each, other, depth + 1) for each in kind.__iter__(value)]}
    if isinstance(value, dict):
        pairs = [
            (encode(key, other, depth + 1), encode(each, other, depth + 1)) for key, each in dict.items(value)
        ]
        return {"dict": pairs}
    if isinstance(value, bytes | bytearray):
        return {type(value).__name__ if type(value) in (bytes, bytearray) else "bytes": bytes(value).hex()}
    if isinstance(value, complex):
        return {"complex": [value.real, value.imag]}
    for method in ("tolist", "item"):  # numpy's arrays and numbers
        if type(value).__module__.partition(".")[0] == "numpy" and hasattr(value, method):
            return encode(getattr(value, method)(), other, depth + 1)
    if other is None:
        raise NotPlain(f"{type(value).__name__} is no plain data")
    return other(value)


def decode(given: Any, other: Callable[[str, Any], Any] | None = None) -> Any:
    """The value of what `encode` made; `other` is asked about kinds that it does not know. Raises NotPlain."""
    if not isinstance(given, dict):
        return given
    try:
        ((kind, inner),) = given.items()
        if kind in _KINDS:
            return _KINDS[kind]([decode(each, other) for each in inner])
        if kind == "dict":
            return {decode(key, other): decode(each, other) for key, each in inner}
        if kind in ("bytes", "bytearray"):
            return getattr(builtins, kind).fromhex(inner)
        if kind == "int":
            return int(inner, 16)
        if kind == "float":
            return float(inner)
        if kind == "complex":
            return complex(*inner)
    except (ValueError, TypeError, RecursionError) as error:
        raise NotPlain(f"no plain data: {error}") from error
    if other is None:
        raise NotPlain(f"there is no plain data of kind {kind!r}")
    return other(kind, inner)

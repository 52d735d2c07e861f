"""What is wrong with a configuration, as problems that name the key, the reason and the nearest valid value.

Knows no gRPC, so that a worker process can explain its options without loading it.
"""

from __future__ import annotations

import difflib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import Any, get_args

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails


@dataclass(frozen=True)
class KeyProblem:
    """One error: where (`a.b.0.c`), what is wrong, and what to change."""

    key: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.fix}" if self.fix else f"{self.key}: {self.problem}"


LONGEST_NAME = 200
"""Characters of a name that is compared with others."""


def nearest(value: object, allowed: Iterable[str]) -> str | None:
    """The allowed name that looks most like `value`, if any does; a long one, which takes long to compare, is none."""
    if len(str(value)) > LONGEST_NAME:
        return None
    names = {name.lower(): name for name in allowed}
    close = difflib.get_close_matches(str(value).lower(), list(names), n=1, cutoff=0.5)
    return names[close[0]] if close else None


def explain(error: ValidationError, model_class: type[BaseModel]) -> list[KeyProblem]:
    """One KeyProblem per error of a failed validation of `model_class`, in the order of the keys."""
    return [problem for detail in error.errors() for problem in _explain_one(detail, model_class)]


def _explain_one(detail: ErrorDetails, model_class: type[BaseModel]) -> list[KeyProblem]:
    """A validator's error may list problems of its own, each with key, problem and fix."""
    listed = getattr(detail.get("ctx", {}).get("error"), "problems", None)
    if listed is None:
        return [_explain_plain(detail, model_class)]
    prefix = "".join(f"{part}." for part in detail["loc"])
    return [KeyProblem(prefix + each.key, each.problem, each.fix) for each in listed]


def _explain_plain(detail: ErrorDetails, model_class: type[BaseModel]) -> KeyProblem:
    location = tuple(detail["loc"])
    key = ".".join(str(part) for part in location) or "(whole)"
    kind = detail["type"]
    if kind == "extra_forbidden":
        return KeyProblem(
            key, "unknown key", _suggest(str(location[-1]), _siblings(location, model_class), "keys")
        )
    if kind == "missing":
        return KeyProblem(key, "is required and missing", "add it")
    if kind in ("literal_error", "enum"):
        allowed = [text.strip("' ") for text in detail["ctx"]["expected"].replace(" or ", ", ").split(", ")]
        return KeyProblem(
            key, f"{_shown(detail['input'])} is not allowed", _suggest(detail["input"], allowed, "values")
        )
    message = detail["msg"].removeprefix("Value error, ")
    if kind == "value_error":
        return _split_sentence(key, message, location)
    return KeyProblem(key, f"{_shown(detail['input'])} is not valid", message[:1].lower() + message[1:])


def _split_sentence(key: str, message: str, location: tuple[int | str, ...]) -> KeyProblem:
    """A validator's own sentence, "key: reason; fix"; it may name its keys itself."""
    named, colon, rest = message.partition(": ")
    if not location and colon and " " not in named:
        key, message = named, rest
    problem, _, fix = message.partition("; ")
    return KeyProblem(key, problem, fix)


def _suggest(given: object, allowed: list[str], noun: str) -> str:
    if not allowed:
        return "remove it"
    close = nearest(given, allowed)
    hint = f"did you mean {close!r}? " if close else ""
    return f"{hint}allowed {noun}: {', '.join(allowed)}"


def _shown(value: object) -> str:
    text = repr(value)
    return text if len(text) <= 80 else text[:77] + "..."


def _siblings(location: tuple[int | str, ...], model_class: type[BaseModel]) -> list[str]:
    models: list[type[BaseModel]] = [model_class]
    for part in location[:-1]:
        fields = [field for model in models if (field := model.model_fields.get(str(part)))]
        if fields:
            models = [found for field in fields for found in _models_in(field.annotation)]
    return list(dict.fromkeys(name for model in models for name in model.model_fields))


def _models_in(annotation: Any) -> Iterator[type[BaseModel]]:
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        yield annotation
    for argument in get_args(annotation):
        yield from _models_in(argument)

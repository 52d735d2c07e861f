"""Typed configuration whose errors name the key, the reason and the nearest valid value.

Used for service sections that arrive as JSON, for the HTTP API and for the command line.
"""

from __future__ import annotations

import difflib
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar, get_args

import grpc
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from headrace_servicekit.errors import ServiceError

Model = TypeVar("Model", bound=BaseModel)


@dataclass(frozen=True)
class KeyProblem:
    """One mistake: where (`a.b.0.c`), what is wrong, and what to change."""

    key: str
    problem: str
    fix: str

    def __str__(self) -> str:
        return f"{self.key}: {self.problem}; {self.fix}" if self.fix else f"{self.key}: {self.problem}"


def parse_config(model_class: type[Model], data: Mapping[str, Any] | str, where: str) -> Model:
    """Validates a mapping or a JSON text. Raises ServiceError INVALID with one sentence per wrong key.

    `where` names the source in the message, such as "config_json of the rollout".
    """
    try:
        if isinstance(data, str):
            return model_class.model_validate_json(data)
        return model_class.model_validate(dict(data))
    except ValidationError as error:
        problems = explain(error, model_class)
        message = f"{where}: " + " | ".join(str(problem) for problem in problems)
        metadata = {"key": problems[0].key, "fix": problems[0].fix}
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message, **metadata) from error


def settings_from_environment(model_class: type[Model], prefix: str) -> Model:
    """Settings from the variables `<prefix><FIELD>` that are set. Raises ServiceError INVALID, naming the variable."""
    given = {name: os.environ.get(prefix + name.upper()) for name in model_class.model_fields}
    try:
        return model_class.model_validate({name: value for name, value in given.items() if value is not None})
    except ValidationError as error:
        problems = [replace(each, key=prefix + each.key.upper()) for each in explain(error, model_class)]
        message = " | ".join(str(problem) for problem in problems)
        raise ServiceError(grpc.StatusCode.INVALID_ARGUMENT, "INVALID", message) from error


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
    nearest = difflib.get_close_matches(str(given), allowed, n=1, cutoff=0.5)
    hint = f"did you mean {nearest[0]!r}? " if nearest else ""
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

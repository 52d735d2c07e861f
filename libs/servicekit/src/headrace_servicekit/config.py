"""Typed configuration whose errors name the key, the reason and the nearest valid value.

Used for service sections that arrive as JSON, and for settings from the environment.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import replace
from typing import Any, TypeVar

import grpc
from pydantic import BaseModel, ValidationError

from headrace_servicekit.problems import explain
from headrace_servicekit.rpc.errors import ServiceError

Model = TypeVar("Model", bound=BaseModel)


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

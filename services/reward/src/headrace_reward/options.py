"""Validates a scorer's options; what is wrong is said as everywhere in Headrace: key, reason, nearest key."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

from headrace_servicekit.problems import explain
from pydantic import BaseModel, ValidationError

from headrace_reward.scorers.base import ScorerError

_OPTIONS = TypeVar("_OPTIONS", bound=BaseModel)


def parse_options(model: type[_OPTIONS], given: Mapping[str, Any]) -> _OPTIONS:
    """Validates the options of one scorer.

    Raises:
        ScorerError: names the first key at fault below `options`, and what is allowed.
    """
    try:
        return model.model_validate(dict(given))
    except ValidationError as error:
        first = explain(error, model)[0]
        field = "options" if first.key == "(whole)" else f"options.{first.key}"
        raise ScorerError(field, f"{first.problem}; {first.fix}" if first.fix else first.problem) from error

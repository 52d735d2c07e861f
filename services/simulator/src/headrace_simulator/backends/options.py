"""What the backends say alike: options that are wrong, names that are not known, packages that are missing."""

from __future__ import annotations

import importlib.util
from collections.abc import Iterable, Mapping
from typing import Any, TypeVar

from headrace_servicekit.problems import explain, nearest
from pydantic import BaseModel, ValidationError

from headrace_simulator.backends.base import BackendError

Model = TypeVar("Model", bound=BaseModel)
MADE = ("metaworld", "maniskill", "libero")
"""Simulators that `make simulators` makes an environment of."""


def parse(model: type[Model], options: Mapping[str, Any]) -> Model:
    """The options of an environment. Raises BackendError with the key, the reason and the nearest key."""
    try:
        return model.model_validate(dict(options))
    except ValidationError as error:
        first = explain(error, model)[0]
        key = "options_json" if first.key == "(whole)" else f"options_json.{first.key}"
        raise BackendError(key, f"{first.problem}; {first.fix}") from error


def unknown(kind: str, name: str, known: Iterable[str]) -> BackendError:
    """The refusal of a name, with the one that is nearest to it."""
    close = nearest(name, known)
    hint = f"; did you mean {close!r}?" if close else ""
    return BackendError("environment.name", f"there is no {kind} {name!r}{hint}")


def require(extra: str, *modules: str, way: str = "") -> None:
    """Raises BackendError where a module of an extra is not installed. `way`: how it is, where no extra brings it."""
    missing = [name for name in modules if importlib.util.find_spec(name) is None]
    if missing:
        in_checkouts = f", or, in a checkout, `make simulators SIM={extra}`" if extra in MADE else ""
        way = way or f"pip install 'headrace-simulator[{extra}]'{in_checkouts}"
        raise BackendError("environment.backend", f"it needs {', '.join(missing)}: {way}")

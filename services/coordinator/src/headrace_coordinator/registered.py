"""Plug-ins that are their own options: pydantic models picked by name, such as data sources and suites."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar

from headrace_schema.problems import Impossible, as_views, explain_value
from headrace_servicekit.registry import Plugin, PluginError, Registry
from pydantic import BaseModel

Model = TypeVar("Model", bound=BaseModel)


def subclasses_of(base: type[BaseModel], name: str) -> Callable[[Any], Plugin]:
    """Makes a plug-in of a published subclass of `base`, for a registry; TypeError names `name` for anything else."""

    def as_plugin(found: Any) -> Plugin:
        if isinstance(found, type) and issubclass(found, base):
            return Plugin(lambda model: model, found, (found.__doc__ or "").partition("\n")[0])
        raise TypeError(f"is no subclass of {name}")

    return as_plugin


def opened(registry: Registry[Model], name: str, options: dict[str, Any]) -> Model:
    """The plug-in of a name, made of these options; `Impossible` names the keys that are wrong."""
    try:
        found = registry.find(name).options
    except PluginError as error:
        raise Impossible(as_views(error.problems)) from error
    if wrong := explain_value(found, options, registry.options_key):
        raise Impossible(wrong)
    model: Model = found.model_validate(options)  # type: ignore[assignment]
    return model

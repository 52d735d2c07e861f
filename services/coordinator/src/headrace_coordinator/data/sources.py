"""What a data source is, and the registry that picks one by name.

A source is its own options: a pydantic model that yields items. To add one, add a file here, or publish a
class in the entry point group `headrace.data_sources`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator
from functools import cache
from importlib import import_module
from importlib.metadata import entry_points
from typing import Any

from headrace_schema.problems import Impossible, choose, explain, problem
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_coordinator.data.items import DataItem

GROUP = "headrace.data_sources"
BUILT_IN = {
    "copy_digits": "headrace_coordinator.data.copy_digits:CopyDigits",
    "jsonl": "headrace_coordinator.data.jsonl:Jsonl",
    "reasoning_gym": "headrace_coordinator.data.reasoning_gym_source:ReasoningGym",
}


class DataSource(BaseModel, ABC):
    """A source of items; its fields are the keys of `data.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @abstractmethod
    def items(self) -> Iterator[DataItem]:
        """Yields the items, the same ones in every process; `Impossible` names the option that is wrong."""

    def fingerprint(self) -> str:
        """Differs when `items` may yield something else, such as a file's time and size."""
        return ""


def source_names() -> list[str]:
    """Names of all sources, built in and published by other packages."""
    return sorted({*BUILT_IN, *(entry.name for entry in entry_points(group=GROUP))})


@cache
def source_class(name: str) -> type[DataSource]:
    """The source of a name; `Impossible` names data.source and the nearest source."""
    if name in BUILT_IN:
        module, _, attribute = BUILT_IN[name].partition(":")
        found: Any = getattr(import_module(module), attribute)
    else:
        entry = next(iter(entry_points(group=GROUP, name=name)), None)
        if entry is None:
            reason = f"there is no data source {name!r}"
            raise Impossible([problem("data.source", reason, choose(name, source_names()))])
        found = _load(entry)
    return _checked(name, found)


def _load(entry: Any) -> Any:
    try:
        return entry.load()
    except (ImportError, AttributeError) as error:
        reason = f"the data source {entry.name!r} ({entry.value}) cannot be imported: {error}"
        raise Impossible(
            [problem("data.source", reason, "repair or remove the package that publishes it")]
        ) from error


def _checked(name: str, found: Any) -> type[DataSource]:
    if isinstance(found, type) and issubclass(found, DataSource):
        return found
    reason = f"the data source {name!r} is no subclass of headrace_coordinator.data.DataSource"
    raise Impossible([problem("data.source", reason, "repair the package that publishes it")])


def open_source(name: str, options: dict[str, Any]) -> DataSource:
    """The source of a name with these options; `Impossible` names the keys that are wrong."""
    found = source_class(name)
    try:
        return found.model_validate(options)
    except ValidationError as error:
        raise Impossible(explain(error, found, "data.options")) from error

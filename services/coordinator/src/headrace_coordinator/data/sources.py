"""What a data source is, and the registry that picks one by name.

A source is its own options: a pydantic model that yields items. To add one, add a file here and name it below, or
publish a subclass in the entry point group `headrace.data_sources`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Sequence
from typing import Any

from headrace_schema.problems import Impossible, problem
from headrace_schema.references import Unread, resolved
from headrace_servicekit.registry import Registry
from pydantic import BaseModel, ConfigDict, ValidationError

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.registered import opened, subclasses_of

MOST_ITEMS = 2**21
"""Of all the data of a run, as they are read: memory has about a hundred bytes of each."""


class DataSource(BaseModel, ABC):
    """A source of items; its fields are the keys of `data.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    @abstractmethod
    def items(self) -> Iterator[DataItem]:
        """Yields the items, the same ones in every process; `Impossible` names the option that is wrong."""

    def left_out(self) -> dict[str, int]:
        """How many rows `items`, once it is exhausted, has left out, by reason."""
        return {}

    def weights(self) -> tuple[int, ...]:
        """How many of each sum(weights) successive prompts are of part 0, 1, … (field `part`); empty: as items are."""
        return ()

    def wholes(self) -> Sequence[int]:
        """A number for each item, the same for those that are held out together; empty: each is held out by itself."""
        return ()

    def fingerprint(self) -> str:
        """Differs when `items` may yield something else, such as a file's time and size."""
        return ""


SOURCES: Registry[DataSource] = Registry(
    "headrace.data_sources",
    "data source",
    "data.source",
    "data.options",
    {
        "copy_digits": "headrace_coordinator.data.builtin.copy_digits:CopyDigits",
        "episodes": "headrace_coordinator.data.builtin.episodes:Episodes",
        "huggingface": "headrace_coordinator.data.builtin.huggingface:HuggingFace",
        "jsonl": "headrace_coordinator.data.builtin.jsonl:Jsonl",
        "lerobot": "headrace_coordinator.data.builtin.lerobot:LeRobot",
        "mixture": "headrace_coordinator.data.builtin.mixture:Mixture",
        "parquet": "headrace_coordinator.data.builtin.parquet:Parquet",
        "reasoning_gym": "headrace_coordinator.data.builtin.reasoning_gym_source:ReasoningGym",
    },
    subclasses_of(DataSource, "headrace_coordinator.data.DataSource"),
)


def bounded(items: Iterable[DataItem], most: int) -> Iterator[DataItem]:
    """The items; raises `Impossible` where there are more than `most`."""
    for number, item in enumerate(items):
        if number == most:
            reason = f"holds more items than the {MOST_ITEMS:,} that all the data of a run may have"
            raise Impossible([problem("data.source", reason, "name fewer, such as a slice of them")])
        yield item


def open_source(name: str, options: dict[str, Any]) -> DataSource:
    """The source of a name with these options, its secrets read; `Impossible` names the keys that are wrong."""
    source = opened(SOURCES, name, options)
    try:
        found = resolved(options)
        return source if found is options else type(source).model_validate(found)
    except Unread as error:
        raise Impossible([problem(f"data.options.{error.key}", error.reason, error.fix)]) from error
    except ValidationError:
        reason = "what one of its references stands for is no valid value"
        raise Impossible([problem("data.options", reason, "correct it there")]) from None

"""What a suite is, and the registry that picks one by name.

A suite is its own options: a pydantic model that says which items are asked, how a prompt is made of one, how answers
are judged, and what an answer chooses. To add one, add it here and name it below, or publish a subclass in the entry
point group `headrace.suites`.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from typing import Any, ClassVar

from headrace_schema.sections.embodied import EnvironmentSection
from headrace_schema.sections.generating import DataSection
from headrace_schema.sections.scoring import RewardSection
from headrace_servicekit.registry import Registry
from pydantic import BaseModel, ConfigDict

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.registered import opened, subclasses_of


class Suite(BaseModel, ABC):
    """A suite of questions that are answered in text; its fields are the keys of `suite.options`."""

    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)

    one_answer: ClassVar[bool] = False
    """Whether only what equals the reference is right: then right answers are one choice, however they are written."""

    @abstractmethod
    def data(self) -> DataSection:
        """The source of the items, and the prompt."""

    @abstractmethod
    def reward(self) -> RewardSection:
        """What answers are worth."""

    def acts_in(self) -> EnvironmentSection | None:
        """What a robot policy acts in; None where answers are text."""
        return None

    def task_of(self, item: DataItem) -> tuple[str, str]:
        """The (task, variant) that an item is of, which has figures of its own; empty where items are alike."""
        return "", ""

    def recorded(self, items: Sequence[DataItem]) -> frozenset[int]:
        """Indices of the items of whose episodes a video is made."""
        return frozenset()

    def key(self, data_key: str) -> str:
        """The user's key for a key of the data section, in which the source names its problems."""
        return data_key.replace("data.source", "suite.name", 1).replace("data.", "suite.", 1)

    def extract(self, completion: str) -> str:
        """What an answer chooses, for the majority vote: equal texts are one choice, "" abstains."""
        return " ".join(completion.split())


_HERE = "headrace_coordinator.suites"
SUITES: Registry[Suite] = Registry(
    "headrace.suites",
    "suite",
    "suite.name",
    "suite.options",
    {
        "aime24": f"{_HERE}.files:Aime24",
        "aime25": f"{_HERE}.files:Aime25",
        "episodes": f"{_HERE}.episodes:Episodes",
        "gpqa_diamond": f"{_HERE}.files:GpqaDiamond",
        "gsm8k": f"{_HERE}.files:Gsm8k",
        "items": f"{_HERE}.generated:Items",
        "math500": f"{_HERE}.files:Math500",
        "reasoning_gym": f"{_HERE}.generated:ReasoningGym",
    },
    subclasses_of(Suite, "headrace_coordinator.suites.Suite"),
)


def open_suite(name: str, options: dict[str, Any]) -> Suite:
    """The suite of a name with these options; `Impossible` names the keys that are wrong."""
    return opened(SUITES, name, options)

"""Suites of generated items: a generator of reasoning-gym, or any data source with scorers of the user's choice."""

from __future__ import annotations

from typing import Annotated, Any, ClassVar, Literal

from headrace_schema.sections.generating import DataSection
from headrace_schema.sections.scoring import RewardSection, ScorerSection
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.suites.base import Suite
from headrace_coordinator.suites.extracting import last_box, last_choice, last_number, plain_math

Extract = Literal["text", "last_line", "last_number", "last_box", "last_choice"]


def last_line(text: str) -> str:
    """The last line that is not blank."""
    lines = text.strip().split("\n")
    return lines[-1].strip()


_EXTRACTORS = {
    "last_line": last_line,
    "last_number": last_number,
    "last_box": lambda text: plain_math(last_box(text)),
    "last_choice": last_choice,
}


class ReasoningGym(Suite):
    """Distinct questions of a generator of reasoning-gym, judged by the generator itself."""

    dataset: str = Field(description="name of the generator, such as chain_sum")
    config: dict[str, Any] = Field(default_factory=dict, description="parameters of the generator")
    seed: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0,
        description="of the questions; a run's are drawn with 0 unless its data options say otherwise",
    )
    size: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=200, description="questions to draw; a smaller space is drawn whole"
    )
    judged: Literal["none", "last_line", "last_number"] = Field(
        default="none", description="the part of the answer that is judged; none: all of it"
    )

    @override
    def data(self) -> DataSection:
        config = {"seed": self.seed, **self.config}
        options = {"dataset": self.dataset, "config": config, "limit": self.size}
        return DataSection(source="reasoning_gym", options=options)

    @override
    def key(self, data_key: str) -> str:
        return super().key(data_key).replace("suite.options.limit", "suite.options.size")

    @override
    def reward(self) -> RewardSection:
        """What the generator says of the answer."""
        options = {"extract": self.judged}
        return RewardSection(scorers=[ScorerSection(name="reasoning_gym", options=options)])

    @override
    def extract(self, completion: str) -> str:
        extractor = _EXTRACTORS.get(self.judged)
        return extractor(completion) if extractor else super().extract(completion)


class Items(Suite):
    """Items of any data source; the answer must be equal to the reference unless `reward` says otherwise."""

    one_answer: ClassVar[bool] = True

    source: str = Field(description="name of a data source")
    options: dict[str, Any] = Field(default_factory=dict, description="options of the source")
    exclude: list[str] = Field(default_factory=list, description="questions that are not asked")
    heldout: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="ask only what a run with this data.heldout sets aside; 0: all items"
    )
    heldout_seed: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=1, description="data.heldout_seed of that run"
    )
    choice: Extract = Field(
        default="text", description="what counts as one choice in a majority vote: all of the text, or a part"
    )

    @override
    def data(self) -> DataSection:
        return DataSection(
            source=self.source,
            options=self.options,
            exclude=self.exclude,
            heldout=self.heldout,
            heldout_seed=self.heldout_seed,
        )

    @override
    def key(self, data_key: str) -> str:
        return data_key.replace("data.", "suite.options.", 1)

    @override
    def reward(self) -> RewardSection:
        """Equality with the reference."""
        return RewardSection(scorers=[ScorerSection(name="exact")])

    @override
    def extract(self, completion: str) -> str:
        extractor = _EXTRACTORS.get(self.choice)
        return extractor(completion) if extractor else super().extract(completion)

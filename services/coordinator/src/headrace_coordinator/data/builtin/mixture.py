"""Items of several sources in one run, in shares by number of items or by weight."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from itertools import islice
from typing import Annotated, Any, Self

from headrace_schema.problems import Impossible, problem
from headrace_schema.sections.base import FEW
from pydantic import BaseModel, ConfigDict, Field, PrivateAttr, model_validator
from typing_extensions import override

from headrace_coordinator.data.items import DataItem
from headrace_coordinator.data.sources import DataSource, open_source


class Part(BaseModel):
    """One source of a mixture."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    source: str = Field(description="name of a data source")
    options: dict[str, Any] = Field(default_factory=dict, description="options of that source")
    items: Annotated[int, Field(strict=True, ge=0)] = Field(
        default=0, description="most items of it, the first ones; 0: all"
    )
    weight: Annotated[int, Field(strict=True, ge=1, le=1000)] | None = Field(
        default=None,
        description="prompts of it among as many as all weights add up to (3 and 7 for shares of 0.3 and 0.7); none: "
        "items are its share",
    )


class Mixture(DataSource):
    """Items of all parts. Their shares are their weights, or, as each item counts once an epoch, their `items`.

    Every item has the template field `part`, the place of its source in the list, from 0.
    """

    parts: Annotated[tuple[Part, ...], Field(min_length=1, max_length=FEW, description="the sources")]
    _left_out: Counter[str] = PrivateAttr(default_factory=Counter)

    @model_validator(mode="after")
    def _weighted(self) -> Self:
        without = [place for place, part in enumerate(self.parts) if part.weight is None]
        if without and len(without) < len(self.parts):
            raise ValueError(f"parts[{without[0]}].weight: give every part a weight, or none")
        return self

    @override
    def weights(self) -> tuple[int, ...]:
        """The parts' weights."""
        return tuple(part.weight for part in self.parts if part.weight is not None)

    @override
    def fingerprint(self) -> str:
        """The parts' fingerprints."""
        return "|".join(source.fingerprint() for source in self._sources())

    @override
    def left_out(self) -> dict[str, int]:
        return dict(self._left_out)

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields the parts' items one part after the other; `Impossible` names the part's option."""
        for place, (part, source) in enumerate(zip(self.parts, self._sources(), strict=True)):
            found = 0
            try:
                for item in islice(source.items(), part.items or None):
                    found += 1
                    yield replace(item, fields={**item.fields, "part": place})
            except Impossible as error:
                raise _below(place, error) from error
            self._left_out.update(source.left_out())
            if found < part.items:
                reason = f"the source has {found} items, not {part.items}"
                key = f"data.options.parts[{place}].items"
                raise Impossible([problem(key, reason, f"the nearest valid value is {found}")])

    def _sources(self) -> list[DataSource]:
        found = []
        for place, part in enumerate(self.parts):
            if part.source == "mixture":
                key = f"data.options.parts[{place}].source"
                raise Impossible([problem(key, "a mixture cannot hold a mixture", "list its parts here")])
            try:
                found.append(open_source(part.source, part.options))
            except Impossible as error:
                raise _below(place, error) from error
        return found


def _below(place: int, error: Impossible) -> Impossible:
    """The same problems under the part's keys: data.options.path → data.options.parts[0].options.path."""
    where = f"data.options.parts[{place}]"
    return Impossible(
        [
            problem(each.key.replace("data.", f"{where}.", 1), each.problem, each.fix)
            for each in error.problems
        ]
    )

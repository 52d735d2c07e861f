"""Items of a generator of reasoning-gym (https://github.com/open-thought/reasoning-gym).

The package is an extra and slow to import, so it is imported when a run asks for it.
"""

from __future__ import annotations

import dataclasses
import json
import time
from collections.abc import Iterator
from typing import Annotated, Any, NoReturn

from headrace_schema.problems import Impossible, choose, problem, show
from pydantic import Field, model_validator
from typing_extensions import override

from headrace_coordinator.data.items import DataItem, canonical
from headrace_coordinator.data.sources import DataSource

# A space is exhausted after PATIENCE × (its items so far) draws in a row without a new one. With uniform
# draws a given item is missed with probability exp(-PATIENCE); the floor covers small, uneven spaces.
PATIENCE = 30
PATIENCE_FLOOR = 3000
DRAWS_PER_ITEM = 100
DRAWING_S = 60.0


class ReasoningGym(DataSource):
    """Distinct questions of one generator, in the order in which they are drawn."""

    dataset: str = Field(description="name of the generator, such as chain_sum")
    config: dict[str, Any] = Field(default_factory=dict, description="parameters of the generator")
    limit: Annotated[int, Field(strict=True, ge=1, le=1_000_000)] = Field(
        default=2000, description="most distinct items to draw; a smaller space is drawn whole"
    )

    @model_validator(mode="before")
    @classmethod
    def _flat_parameters(cls, data: Any) -> Any:
        """Parameters may stand beside `dataset` as well: {dataset: chain_sum, min_terms: 2}."""
        if not isinstance(data, dict) or not isinstance(data.get("config", {}), dict):
            return data
        known = {key: value for key, value in data.items() if key in cls.model_fields}
        flat = {key: value for key, value in data.items() if key not in cls.model_fields}
        return {**known, "config": {**data.get("config", {}), **flat}} if flat else data

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields distinct items; the draws start at `config.seed` (default 0), never at the run's seed."""
        generator = self._generator()
        seen: set[str] = set()
        misses = 0
        deadline = time.monotonic() + DRAWING_S
        for index in range(self.limit * DRAWS_PER_ITEM):
            if time.monotonic() > deadline:
                self._too_slow(len(seen))
            entry = generator[index]
            key = canonical(entry["question"])
            if key in seen:
                misses += 1
                if misses >= max(PATIENCE_FLOOR, PATIENCE * len(seen)):
                    return
                continue
            misses = 0
            seen.add(key)
            yield self._item(entry)
            if len(seen) == self.limit:
                return

    def _too_slow(self, drawn: int) -> NoReturn:
        reason = (
            f"{self.dataset} gave {drawn} distinct items in {DRAWING_S:.0f} s, not the {self.limit} asked for"
        )
        fix = f"the nearest valid value is about {max(1, drawn // 2)}"
        raise Impossible([problem("data.options.limit", reason, fix)])

    def _item(self, entry: dict[str, Any]) -> DataItem:
        # Through JSON once, so that an item is the same here and on the scorer's side (tuples become lists).
        plain = json.loads(json.dumps(entry, default=str))
        facts = plain["metadata"]
        fields = {
            key: value
            for key, value in facts.items()
            if isinstance(value, (str, int, float)) and key not in ("source_dataset", "source_index")
        }
        metadata = {"dataset": self.dataset, "item": plain}
        return DataItem(entry["question"], str(entry["answer"]), fields, metadata)

    def _generator(self) -> Any:
        try:
            import reasoning_gym
            from reasoning_gym.factory import DATASETS
        except ImportError as error:
            reason = f"the data source reasoning_gym needs a package that is not installed ({error})"
            fix = "pip install 'headrace-coordinator[reasoning-gym]'"
            raise Impossible([problem("data.source", reason, fix)]) from error
        if self.dataset not in DATASETS:
            reason = f"reasoning-gym has no generator {self.dataset!r}"
            raise Impossible([problem("data.options.dataset", reason, choose(self.dataset, DATASETS))])
        config_class = DATASETS[self.dataset][1]
        self._check_parameters({field.name for field in dataclasses.fields(config_class)} - {"size"})
        try:
            config = {"seed": 0, **self.config, "size": self.limit * DRAWS_PER_ITEM}
            return reasoning_gym.create_dataset(self.dataset, **config)
        except (AssertionError, TypeError, ValueError) as error:
            reason = (
                f"{self.dataset} refuses its parameters {show(self.config)}: {error or type(error).__name__}"
            )
            raise Impossible(
                [problem("data.options.config", reason, "change the parameter it names")]
            ) from error

    def _check_parameters(self, known: set[str]) -> None:
        wrong = [
            problem(f"data.options.config.{key}", f"{self.dataset} has no such parameter", choose(key, known))
            for key in self.config
            if key not in known
        ]
        if wrong:
            raise Impossible(wrong)

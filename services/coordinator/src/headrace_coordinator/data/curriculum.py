"""A curriculum: which training items are drawn, by the pass rates of their last groups. Knows no events."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_schema.sections.generating import CurriculumSection

from headrace_coordinator.data.dataset import Dataset
from headrace_coordinator.data.items import DataItem

TRIES = 64
"""Items that a curriculum looks at for one prompt; when none fits, it takes the first."""
Observed = tuple[int, int, int]
"""Place of an item in the training part, answers that passed, answers."""


class Curriculum:
    """Draws items whose last group had a pass rate within the window, items that were never drawn, and a few others.

    The choice is a function of the prompt ordinal and of what was observed before the step, which the run's history
    has: a resumed run that is told the same goes on with the same prompts.
    """

    def __init__(self, section: CurriculumSection, dataset: Dataset) -> None:
        self._section = section
        self._dataset = dataset
        self._rates: dict[int, float] = {}

    def begin(self, observed: Iterable[Observed]) -> None:
        """Forgets everything but what these groups, oldest first, say."""
        self._rates = {}
        self.observe(observed)

    def observe(self, observed: Iterable[Observed]) -> None:
        """Takes the pass rates of a step's groups; only between two steps, as `item` changes by it."""
        self._rates.update((place, passed / answers) for place, passed, answers in observed)

    def item(self, prompt_ordinal: int) -> DataItem:
        """The item of a prompt ordinal: that of the epoch's order, or another one of its part in its place."""
        for attempt in range(TRIES):
            item = self._dataset.train_item(prompt_ordinal, attempt)
            if self._fits(item) or self._dataset.chance(prompt_ordinal, attempt) < self._section.revisit:
                return item
        return self._dataset.train_item(prompt_ordinal)

    def _fits(self, item: DataItem) -> bool:
        rate = self._rates.get(self._dataset.place(item))
        return rate is None or self._section.min_pass_rate <= rate <= self._section.max_pass_rate

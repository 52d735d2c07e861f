"""Answers that a run's data gives: which ones a row has, what each is worth, and rows that lack one. Knows no step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_schema.problems import Impossible, problem
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import SUPERVISED

from headrace_coordinator.data.builtin.values import BadRow, value_of
from headrace_coordinator.data.items import DataItem

SHOWN = 60
"""Characters of a question by which a row is told."""
IMITATED, PAIRS, LABELS = "imitated", "pairs", "labels"
"""One answer to imitate; a chosen and a rejected one; one that is labelled good or bad."""
REJECTED, LABEL = "rejected", "label"


@dataclass(frozen=True)
class GivenForm:
    """How rows of a run give answers: `kind`, and the key of a row's weight."""

    kind: str
    weight: str = ""

    @classmethod
    def of(cls, spec: RunSpec) -> GivenForm | None:
        """None of a run that samples its answers."""
        if not spec.has_given_answers:
            return None
        weight = spec.data.options.get("weight", "")
        if spec.workflow == SUPERVISED:
            return cls(IMITATED, weight if isinstance(weight, str) else "")
        return cls(LABELS if spec.algorithm.name == "kto" else PAIRS)

    def answers(self, item: DataItem, other: DataItem) -> list[tuple[str, float]]:
        """The answers of a row's group with their rewards; `other`: another row, whose answer is no answer to this one.

        Raises `BadRow`.
        """
        if not item.answer.strip():
            raise BadRow("has no answer to learn from", "give it one, or remove the row")
        if self.kind == IMITATED:
            return [(item.answer, _weight(item.metadata, self.weight))]
        if self.kind == LABELS:
            return [(item.answer, 1.0 if _label(item.metadata) else -1.0), (other.answer, 0.0)]
        rejected = item.metadata.get(REJECTED)
        if not isinstance(rejected, str) or not rejected.strip():
            raise BadRow("has no rejected answer", "give one under 'rejected' (data.options.form: dpo)")
        return [(item.answer, 1.0), (rejected, 0.0)]

    def checked(self, items: Iterable[DataItem]) -> Iterator[DataItem]:
        """The items. Raises `Impossible`, which names the first row without its answers."""
        for number, item in enumerate(items, 1):
            try:
                self.answers(item, item)
            except BadRow as bad:
                begins = item.question.strip()[:SHOWN]
                reason = f"row {number} ({begins!r}) {bad.reason}"
                raise Impossible([problem("data.source", reason, bad.fix)]) from bad
            yield item if item.id else replace(item, id=item.told_apart_with_answers())


def _weight(row: Mapping[str, Any], key: str) -> float:
    if not key:
        return 1.0
    found = value_of(row, key)
    if isinstance(found, bool) or not isinstance(found, (int, float)) or found < 0:
        raise BadRow(f"has {found!r} under {key!r}", "write a number from 0 on: what the row counts")
    return float(found)


def _label(row: Mapping[str, Any]) -> bool:
    found = row.get(LABEL)
    if not isinstance(found, bool) and found not in (0, 1):
        raise BadRow(f"has {found!r} under 'label'", "write true for a good answer, and false for a bad one")
    return bool(found)

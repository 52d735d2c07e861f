"""Answers that a run's data gives: which ones a row has, what each is worth, and rows that lack one. Knows no step."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace_schema.problems import Impossible, problem
from headrace_schema.rules.asked import LABELLED, STEPWISE
from headrace_schema.spec import RunSpec
from headrace_schema.workflow import SUPERVISED

from headrace_coordinator.data.builtin.forms import ANSWER_TURN, REJECTED_TURN
from headrace_coordinator.data.builtin.values import BadRow, value_of
from headrace_coordinator.data.items import DataItem

SHOWN = 60
"""Characters of a question by which a row is told."""
IMITATED, PAIRS, LABELS, STEPS = "imitated", "pairs", "labels", "steps"
"""One answer to imitate; a chosen and a rejected one; one that is labelled good or bad, or each of whose steps is."""
REJECTED, LABEL = "rejected", "label"
_OF_PAIRS = (REJECTED, REJECTED_TURN, ANSWER_TURN)
COMPLETIONS, STEP_LABELS = "completions", "labels"
"""Keys of a row's steps and of their labels, as TRL's."""


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
        name = spec.algorithm.name
        return cls(LABELS if name in LABELLED else STEPS if name in STEPWISE else PAIRS)

    def answers(self, item: DataItem, other: DataItem) -> list[tuple[str, float]]:
        """The answers of a row's group with their rewards; `other`: another row, whose answer is no answer to this one.

        Raises `BadRow`.
        """
        if self.kind == STEPS:
            steps, labels = steps_of(item)
            return [("\n\n".join(steps), sum(labels) / len(labels))]
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

    def turns(self, item: DataItem) -> list[dict[str, Any] | None]:
        """Of the answers of a row those that are more than texts: turns that call tools."""
        own = item.metadata.get(ANSWER_TURN)
        return [own, item.metadata.get(REJECTED_TURN) if self.kind == PAIRS else None]

    def checked(self, items: Iterable[DataItem]) -> Iterator[DataItem]:
        """The items. Raises `Impossible`, which names the first row without its answers."""
        for number, item in enumerate(self._single(items), 1):
            try:
                if not item.question and self.kind != IMITATED:
                    raise BadRow(
                        "is a text without a prompt", "give prompt and answers, or set workflow: supervised"
                    )
                self.answers(item, item)
            except BadRow as bad:
                begins = item.question.strip()[:SHOWN]
                reason = f"row {number} ({begins!r}) {bad.reason}"
                raise Impossible([problem("data.source", reason, bad.fix)]) from bad
            yield item if item.id else replace(item, id=item.told_apart_with_answers())

    def _single(self, items: Iterable[DataItem]) -> Iterator[DataItem]:
        """Of labelled answers a pair is two: TRL's unpaired form of it."""
        for item in items:
            if self.kind != LABELS or REJECTED not in item.metadata or LABEL in item.metadata:
                yield item
                continue
            rest = {key: value for key, value in item.metadata.items() if key not in _OF_PAIRS}
            good, bad = (f"{item.id} {label}" if item.id else "" for label in (True, False))
            yield replace(item, id=good, metadata={**rest, **_kept(item, ANSWER_TURN), LABEL: True})
            turn = {ANSWER_TURN: item.metadata[REJECTED_TURN]} if REJECTED_TURN in item.metadata else {}
            yield replace(
                item, id=bad, answer=str(item.metadata[REJECTED]), metadata={**rest, **turn, LABEL: False}
            )


def with_questions(items: Iterable[DataItem]) -> Iterator[DataItem]:
    """The items of a run that samples its answers. Raises `Impossible` for what only a supervised run learns from."""
    for number, item in enumerate(items, 1):
        if not item.question or ANSWER_TURN in item.metadata:
            what = "ends with calls of tools, which are no text that could be the answer"
            reason = f"row {number} {what if item.question else 'is a text without a question'}"
            raise Impossible(
                [problem("data.source", reason, "set workflow: supervised, or give it a question")]
            )
        yield item


def _kept(item: DataItem, key: str) -> dict[str, Any]:
    return {key: item.metadata[key]} if key in item.metadata else {}


def steps_of(item: DataItem) -> tuple[list[str], list[float]]:
    """The steps of a row's answer, and 1 for each good one. Raises `BadRow`."""
    steps, labels = item.metadata.get(COMPLETIONS), item.metadata.get(STEP_LABELS)
    fix = "write a list of texts under 'completions' and one of true and false, as long, under 'labels'"
    if (
        not isinstance(steps, list)
        or not steps
        or not all(isinstance(each, str) and each.strip() for each in steps)
    ):
        raise BadRow(f"has {str(steps)[:SHOWN]!r} under 'completions'", fix)
    if (
        not isinstance(labels, list)
        or len(labels) != len(steps)
        or any(each not in (0, 1) for each in labels)
    ):
        raise BadRow(f"has {str(labels)[:SHOWN]!r} under 'labels' for {len(steps)} steps", fix)
    return steps, [float(each) for each in labels]


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

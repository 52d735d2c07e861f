"""How the items of a run look in a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace_cli.show.reporters import BLOCKS

BUCKETS = 40


@dataclass(frozen=True)
class Lengths:
    """Lengths of all training prompts, ascending, in `unit`."""

    unit: str
    values: Sequence[int]

    def marks(self) -> dict[str, int]:
        """Shortest, middle, 99th percentile and longest."""
        last = len(self.values) - 1
        return {
            "shortest": self.values[0],
            "median": self.values[last // 2],
            "p99": self.values[-(-99 * last // 100)],
            "longest": self.values[last],
        }

    def picture(self, width: int) -> str:
        """A histogram from the shortest to the longest."""
        low, high = self.values[0], self.values[-1]
        buckets = max(1, min(width, BUCKETS, high - low + 1))
        counts = [0] * buckets
        for value in self.values:
            counts[min(buckets - 1, (value - low) * buckets // max(1, high - low + 1))] += 1
        top = max(counts)
        return "".join(" " if not count else BLOCKS[(len(BLOCKS) - 1) * count // top] for count in counts)


def dataset_lines(document: Mapping[str, Any], lengths: Lengths, width: int) -> Iterator[str]:
    """What is trained on, what is held out, what is left out and why, and how long prompts are."""
    yield f"{document['items']} items: {document['train']} to train on, {document['heldout']} held out"
    if document["repeated"]:
        yield f"  {document['repeated']} repeat an earlier one and are left out"
    if document["contradicting"]:
        yield f"  {document['contradicting']} are answered in more than one way; the first answer counts"
    for reason, count in document["left_out"].items():
        yield f"  {count} left out: {reason}"
    if document["unanswered"]:
        yield f"  {document['unanswered']} of those to train on have no answer"
    if document["too_long"]:
        yield f"  {document['too_long']} prompts are longer than data.prompt.longest, and dropped in their turn"
    for name, count in document["evaluation"].items():
        yield f"evaluation.data.{name}: {count} items"
    marks = lengths.marks()
    yield f"prompts, {lengths.unit}: " + ", ".join(f"{name} {value}" for name, value in marks.items())
    yield f"  {marks['shortest']} {lengths.picture(width - 20)} {marks['longest']}"

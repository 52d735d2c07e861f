"""The items of a run: which are held out, which are trained, and in which order. Pure once it is open.

Knows no events.
"""

from __future__ import annotations

import asyncio
import hashlib
import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache

from headrace_schema.problems import Impossible, problem
from headrace_schema.sections.generating import CurriculumSection, DataSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.data.items import DataItem, squeezed
from headrace_coordinator.data.prompts import PromptContent, Prompter
from headrace_coordinator.data.sources import DataSource, open_source

ORDERS_KEPT = 2
TRIES = 64
"""Items that a curriculum looks at for one prompt; when none fits, it takes the first."""
Observed = tuple[int, int, int]
"""Place of an item in the training part, answers that passed, answers."""


class Dataset:
    """Held-out and training items of one data section.

    Two items are the same when what the prompt shows of them is, or their ids are; the first one counts. The
    held-out part depends on the items and `heldout_seed` alone: runs with other seeds are judged on the same items.
    """

    def __init__(
        self,
        section: DataSection,
        items: Sequence[DataItem],
        seed: int,
        weights: Sequence[int] = (),
        left_out: Mapping[str, int] | None = None,
    ) -> None:
        excluded = {squeezed(text) for text in section.exclude}
        self._prompter = Prompter(section.prompt, items)
        distinct, self.contradicting = _distinct(items, self._prompter.shown)
        self.repeated = len(items) - len(distinct)
        """Items left out because the same one had been read before."""
        self.left_out = dict(left_out or {})
        """Rows that the source's options leave out, by reason."""
        kept = [item for item in distinct if not excluded & item.names()]
        if len(kept) < len(distinct):
            self.left_out["named by data.exclude"] = len(distinct) - len(kept)
        _enough(section, len(kept), len(distinct) - len(kept))
        ranked = sorted(kept, key=lambda item: _rank(f"heldout {section.heldout_seed}", item))
        self._heldout = ranked[: section.heldout]
        self._train = sorted(ranked[section.heldout :], key=lambda item: item.key)
        self._places = {item.key: place for place, item in enumerate(self._train)}
        self._seed = seed
        self._orders: dict[tuple[int, int], list[DataItem]] = {}
        self._parts = _parts(self._train, weights)
        self._weights = tuple(weights) or (1,)
        self.digest = _digest(self._heldout, self._train)

    @classmethod
    def open(cls, section: DataSection, seed: int) -> Dataset:
        """Reads the source, which may be slow, and splits it. `seed`, the run's, orders the training part.

        Raises:
            Impossible: a source, option, template or number does not fit; its problems name the keys.
        """
        source = open_source(section.source, section.options)
        read = _read(type(source), source.model_dump_json(), source.fingerprint())
        if isinstance(read, Impossible):
            raise Impossible(read.problems)
        items, left_out = read
        return cls(section, items, seed, source.weights(), left_out)

    @property
    def train_size(self) -> int:
        """Distinct items of the training part."""
        return len(self._train)

    def train_item(self, prompt_ordinal: int, attempt: int = 0) -> DataItem:
        """The item of a prompt ordinal (from 0): every epoch is a permutation of the training part.

        With weights, of the part of the source whose turn it is: each block of sum(weights) ordinals has a part as
        often as its weight says, in an order of its own. So an ordinal alone says which item it is, and a resumed run
        goes on exactly where it was. Above 0, `attempt` numbers other items of the same part, to take in its place.
        """
        number, place = divmod(prompt_ordinal, sum(self._weights))
        turns = _turns(self._seed, number, self._weights)
        part = turns[place]
        if attempt:
            return self._parts[part][
                self._draw(f"instead {prompt_ordinal} {attempt}") % len(self._parts[part])
            ]
        drawn = number * self._weights[part] + turns[:place].count(part)
        epoch, position = divmod(drawn, len(self._parts[part]))
        return self._order(part, epoch)[position]

    def chance(self, prompt_ordinal: int, attempt: int) -> float:
        """A number in [0, 1) that is the same for ever."""
        return self._draw(f"chance {prompt_ordinal} {attempt}") / 2**128

    def place(self, item: DataItem) -> int:
        """Where a training item stands among them: the same in every process that reads the same items."""
        return self._places[item.key]

    def _draw(self, purpose: str) -> int:
        return int.from_bytes(_hash(f"{purpose} {self._seed}"), "big")

    def heldout_items(self) -> list[DataItem]:
        """The held-out items, always in the same order."""
        return list(self._heldout)

    def asked(self, limit: int | None = None) -> list[DataItem]:
        """Items of a suite: the held-out ones, else all, always in the same order; `limit`: only the first ones."""
        ranked = self._heldout or sorted(self._train, key=lambda item: _rank("suite", item))
        return ranked[:limit]

    def prompt(self, item: DataItem, prefill: str | None = None) -> PromptContent:
        """The prompt of an item; `prefill`, a template, stands in for data.prompt.prefill."""
        return self._prompter.render(item, prefill)

    def check_template(self, text: str, key: str) -> None:
        """Raises `Impossible` naming `key` when `text` uses fields that the items lack."""
        self._prompter.check(text, key)

    def unanswered(self) -> int:
        """Training items without an answer, which a supervised warm-up cannot use."""
        return sum(not item.answer for item in self._train)

    def _order(self, part: int, epoch: int) -> list[DataItem]:
        if (part, epoch) not in self._orders:
            mine = sorted(kept for kept in self._orders if kept[0] == part)
            for kept in mine[: len(mine) + 1 - ORDERS_KEPT]:
                del self._orders[kept]
            # A sort by keyed hashes rather than a shuffle: it is the same in every Python for ever.
            purpose = f"train {self._seed} {epoch}"
            self._orders[part, epoch] = sorted(self._parts[part], key=lambda item: _rank(purpose, item))
        return self._orders[part, epoch]


async def open_dataset(spec: RunSpec) -> Dataset:
    """The data of a run, opened in a thread; raises `Impossible` as `Dataset.open`."""
    return await asyncio.to_thread(Dataset.open, spec.data, spec.seed)


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


def _distinct(items: Sequence[DataItem], shown: Sequence[str]) -> tuple[list[DataItem], int]:
    """Items that differ, and how many of them the source answers in more than one way; the first answer counts.

    Where the question alone does not tell items apart, the id of each is all that the prompt shows of it.
    """
    first: dict[str, DataItem] = {}
    alike: dict[str, dict[str, DataItem]] = {}
    contradicting: set[str] = set()
    for item in items:
        one = first.setdefault(item.key, item)
        if one is item:
            continue
        same = alike.setdefault(item.key, {one.told_apart(shown): one})
        known = same.setdefault(told := item.told_apart(shown), item)
        if known.answer != item.answer:
            contradicting.add(told)
    found: list[DataItem] = []
    for key, item in first.items():
        same = alike.get(key, {})
        found += [replace(each, id=told) for told, each in same.items()] if len(same) > 1 else [item]
    return found, len(contradicting)


@lru_cache(maxsize=2)
def _read(
    source_class: type[DataSource], options: str, fingerprint: str
) -> tuple[tuple[DataItem, ...], dict[str, int]] | Impossible:
    """Items of a source and what it left out, or why there are none.

    Kept, as a run is checked and started in one process; see `forget_items`.
    """
    source = source_class.model_validate_json(options)
    try:
        return tuple(source.items()), source.left_out()
    except Impossible as error:
        return error


def forget_items() -> None:
    """Drops what was read of sources and is kept; a run that waits reads its own again when it starts."""
    _read.cache_clear()


def _enough(section: DataSection, kept: int, excluded: int) -> None:
    if kept == 0:
        reason = f"the source {section.source} has no item" + (
            f" left after {excluded} excluded" if excluded else ""
        )
        raise Impossible(
            [problem("data.exclude" if excluded else "data.source", reason, "give it items to train on")]
        )
    if section.heldout >= kept:
        reason = f"{section.heldout} held-out items leave none to train on: {kept} distinct items remain" + (
            f" after {excluded} excluded" if excluded else ""
        )
        raise Impossible([problem("data.heldout", reason, f"the nearest valid value is {kept - 1}")])


def _parts(train: list[DataItem], weights: Sequence[int]) -> list[list[DataItem]]:
    """Training items by source, where the sources have weights; else one part with all."""
    if not weights:
        return [train]
    parts = [[item for item in train if item.fields["part"] == part] for part in range(len(weights))]
    if empty := [part for part, items in enumerate(parts) if not items]:
        key = f"data.options.parts[{empty[0]}]"
        reason = (
            "no item of it is left to train on (held out, excluded, or the same as one of a part before it)"
        )
        raise Impossible([problem(key, reason, "give it more items, or leave it out")])
    return parts


@lru_cache(maxsize=64)
def _turns(seed: int, number: int, weights: tuple[int, ...]) -> tuple[int, ...]:
    """The part of each ordinal of a block."""
    parts = [part for part, weight in enumerate(weights) for _ in range(weight)]
    places = sorted(range(len(parts)), key=lambda place: _hash(f"block {seed} {number} {place}"))
    return tuple(parts[place] for place in places)


def _hash(purpose: str) -> bytes:
    return hashlib.blake2b(purpose.encode(), digest_size=16).digest()


def _rank(purpose: str, item: DataItem) -> tuple[bytes, str]:
    key = item.key
    return _hash(f"{purpose}\0{key}"), key


def _digest(heldout: Sequence[DataItem], train: Sequence[DataItem]) -> str:
    """32 hex digits over every item's part, question, answer and fields; what the ledger holds a run to."""
    state = hashlib.blake2b(digest_size=16)
    for part, items in (("heldout", heldout), ("train", train)):
        for item in items:
            row: list[object] = [part, item.question, item.answer, dict(item.fields)]
            row += [[dict(turn) for turn in item.messages]] if item.messages else []
            state.update(json.dumps(row, sort_keys=True, ensure_ascii=False).encode() + b"\n")
    return state.hexdigest()

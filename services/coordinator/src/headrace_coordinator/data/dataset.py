"""The items of a run: which are held out, which are trained, in which order. Pure once it is open; knows no events."""

from __future__ import annotations

import base64
import hashlib
import json
from collections.abc import Mapping, Sequence
from contextvars import copy_context
from dataclasses import dataclass, replace
from functools import cached_property, lru_cache, partial

import numpy as np
from headrace_schema.images import Kind
from headrace_schema.problems import Impossible, problem
from headrace_schema.resources.views import KeyProblemView
from headrace_schema.sections.generating import DataSection
from headrace_schema.spec import RunSpec

from headrace_coordinator.aside import OPENING, Aside, TooSlow
from headrace_coordinator.data.fetching import with_local_data
from headrace_coordinator.data.given import GivenForm, with_questions
from headrace_coordinator.data.items import DataItem, squeezed
from headrace_coordinator.data.packed import HASH_BYTES, WORDS, PackedItems, hash_of, in_order
from headrace_coordinator.data.prompts import PromptContent, Prompter
from headrace_coordinator.data.sources import MOST_ITEMS, DataSource, bounded, open_source
from headrace_coordinator.data.splitting import (
    check_enough,
    distinct_items,
    parts_of,
    turns_of,
    wholes_in_order,
)

ORDERS_KEPT = 2
LARGE = 20_000
"""Training items from which an order takes long enough to find to be found in a thread."""
HELDOUT = "heldout"
"""The kind of evaluation of the held-out items; others are named by sets of `evaluation.data`."""
WARMUP_BYTES = 48_000_000
"""Most bytes of a supervised warm-up's examples, which travel in the message that opens a run at a trainer."""


@dataclass(frozen=True)
class Warmup:
    """What a supervised warm-up imitates: examples, none of them where they have more than WARMUP_BYTES, and bytes."""

    examples: list[dict[str, object]]
    size: int


class Dataset:
    """Held-out and training items of one data section.

    Two items are the same when what the prompt shows of them is, or their ids are; the first one counts. The
    held-out part depends on the items and `heldout_seed` alone: runs with other seeds are judged on the same items.
    """

    def __init__(
        self,
        section: DataSection,
        items: PackedItems | Sequence[DataItem],
        seed: int,
        weights: Sequence[int] = (),
        left_out: Mapping[str, int] | None = None,
        wholes: Sequence[int] = (),
    ) -> None:
        self._items = items = items if isinstance(items, PackedItems) else PackedItems(items)
        self._prompter = Prompter(section.prompt, items)
        distinct, self._ids, self.contradicting = distinct_items(items, self._prompter.shown)
        self.repeated = len(items) - len(distinct)
        """Items left out because the same one had been read before."""
        self.left_out = dict(left_out or {})
        """Rows that the source's options leave out, by reason."""
        kept = self._not_excluded(distinct, {squeezed(text) for text in section.exclude})
        if len(kept) < len(distinct):
            self.left_out["named by data.exclude"] = len(distinct) - len(kept)
        units = np.array(wholes, np.int64)[kept] if len(wholes) else kept
        check_enough(section, len(np.unique(units)), len(distinct) - len(kept))
        self._seed = seed
        self._heldout: list[DataItem] = []
        heldout = np.empty(0, np.int64)
        if section.heldout:
            purpose = f"heldout {section.heldout_seed}"
            if len(wholes):
                chosen = np.isin(units, wholes_in_order(purpose, units)[: section.heldout])
                heldout, kept = kept[chosen], kept[~chosen]
            else:
                ranked = self._ranked(purpose, kept)
                heldout, kept = ranked[: section.heldout], np.sort(ranked[section.heldout :])
            self._heldout = [self._item(number) for number in heldout.tolist()]
        hashes = self._hashes(kept)
        order = in_order(hashes)
        self._train = kept[order]
        """Numbers of the training items, in the order of their keys' hashes."""
        self._train_hashes = hashes[order]
        self._train_high = self._train_hashes["high"].astype(np.uint64)
        self._orders: dict[tuple[int, int], np.ndarray] = {}
        self._parts = parts_of(self._train, items.parts, weights)
        self._weights = tuple(weights) or (1,)
        self.digest = self._digest(heldout)
        self.given: GivenForm | None = None
        """How its rows give answers; None where they are sampled."""
        self.sets: dict[str, tuple[Dataset, list[DataItem]]] = {}
        """The data of evaluation.data and the items that are asked of it, by name."""

    @classmethod
    def open(
        cls, section: DataSection, seed: int, most: int = MOST_ITEMS, given: GivenForm | None = None
    ) -> Dataset:
        """Reads the source, at most so many items, and splits it. `seed`, the run's, orders the training part.

        `given`: its rows give answers, and rows with other answers are other items.

        Raises:
            Impossible: a source, option, template or number does not fit; its problems name the keys.
        """
        source = open_source(section.source, section.options)
        read = _read(type(source), source.model_dump_json(), source.fingerprint(), most, given)
        if isinstance(read, Impossible):
            raise Impossible(read.problems)
        items, left_out = read
        opened = cls(section, items, seed, source.weights(), left_out, source.wholes())
        opened.given = given
        return opened

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
        turns = turns_of(self._seed, number, self._weights)
        part = turns[place]
        if attempt:
            mine = self._parts[part]
            return self._item(mine[self._draw(f"instead {prompt_ordinal} {attempt}") % len(mine)])
        drawn = number * self._weights[part] + turns[:place].count(part)
        epoch, position = divmod(drawn, len(self._parts[part]))
        return self._item(self._order(part, epoch)[position])

    def spread(self, most: int) -> list[DataItem]:
        """At most `most` training items, at even distances in the order of their keys' hashes."""
        return [self._item(number) for number in self._train[:: -(-len(self._train) // most) or 1].tolist()]

    def chance(self, prompt_ordinal: int, attempt: int) -> float:
        """A number in [0, 1) that is the same for ever."""
        return self._draw(f"chance {prompt_ordinal} {attempt}") / 2**128

    def place(self, item: DataItem) -> int:
        """Where a training item stands among them: the same in every process that reads the same items."""
        (wanted,) = np.frombuffer(hash_of(item.key.encode()), WORDS)
        place = int(np.searchsorted(self._train_high, np.uint64(wanted["high"])))
        while self._train_hashes[place] != wanted:
            place += 1
        return place

    def _draw(self, purpose: str) -> int:
        return int.from_bytes(hash_of(f"{purpose} {self._seed}".encode()), "big")

    def heldout_items(self) -> list[DataItem]:
        """The held-out items, always in the same order."""
        return list(self._heldout)

    @property
    def evaluated(self) -> list[str]:
        """Kinds of evaluations of a version: the held-out items, if there are any, and each set of other data."""
        return [*([HELDOUT] if self._heldout else []), *self.sets]

    def of_kind(self, kind: str) -> tuple[Dataset, list[DataItem]]:
        """The items of a kind of evaluation, and the data that renders their prompts."""
        return self.sets.get(kind) or (self, self._heldout)

    def open_sets(self, spec: RunSpec) -> None:
        """Opens evaluation.data, which may be slow. Raises `Impossible` as `open`."""
        left = MOST_ITEMS - len(self._items)
        for name, asked in spec.evaluation.data.items():
            prompt = asked.prompt or spec.data.prompt
            try:
                section = DataSection(source=asked.source, options=asked.options, prompt=prompt)
                opened = Dataset.open(section, spec.seed, left)
            except Impossible as error:
                raise Impossible([_of_set(name, each, spec) for each in error.problems]) from error
            left -= len(opened._items)
            self.sets[name] = opened, opened.asked(asked.limit)
        if self.sets:
            digests = [self.digest, *(f"{name} {each.digest}" for name, (each, _) in self.sets.items())]
            self.digest = hash_of("\n".join(digests).encode()).hex()

    @property
    def asked_size(self) -> int:
        """Items of a suite, without a limit."""
        return len(self._heldout) or self.train_size

    def asked(self, limit: int | None = None) -> list[DataItem]:
        """Items of a suite: the held-out ones, else all, always in the same order; `limit`: only the first ones."""
        if self._heldout:
            return self._heldout[:limit]
        return [self._item(number) for number in self._ranked("suite", self._train)[:limit]]

    def prompt(self, item: DataItem, prefill: str | None = None) -> PromptContent:
        """The prompt of an item; `prefill`, a template, stands in for data.prompt.prefill."""
        return self._prompter.render(item, prefill)

    def check_template(self, text: str, key: str) -> None:
        """Raises `Impossible` naming `key` when `text` uses fields that the items lack."""
        self._prompter.check(text, key)

    @property
    def images(self) -> tuple[Kind, ...]:
        """What images, videos or sounds items have, those of the sets too."""
        own = {kind for _, kinds in self._items.pictured for kind in kinds}
        return tuple(sorted(own.union(*(each.images for each, _ in self.sets.values()))))

    def unanswered(self) -> int:
        """Training items without an answer, which a supervised warm-up cannot use."""
        return int((~self._items.answered[self._train]).sum())

    @cached_property
    def warmup(self) -> Warmup:
        """The training items as examples of a supervised warm-up. Renders each: slow."""
        examples, size = list[dict[str, object]](), 0
        for ordinal in range(self.train_size):
            item = self.train_item(ordinal)
            content = self.prompt(item)
            example: dict[str, object] = {
                "chat": content.chat,
                "text": content.text,
                "prefill": content.prefill,
                "arguments": content.arguments,
                "answer": item.answer,
                "images": [base64.b64encode(image).decode() for image in content.images],
            }
            size += len(json.dumps(example))
            if size <= WARMUP_BYTES:
                examples.append(example)
        return Warmup(examples if size <= WARMUP_BYTES else [], size)

    def ready(self, first: int, last: int) -> bool:
        """Whether `train_item` of these prompt ordinals is quick: their epochs' orders are known, or small."""
        return self.train_size < LARGE or all(each in self._orders for each in self._epochs(first, last))

    def prepare(self, first: int = 0, last: int = 0) -> None:
        """Finds the orders of these ordinals' epochs, which takes seconds where there are a million items."""
        for part, epoch in self._epochs(first, last):
            self._order(part, epoch)

    def _epochs(self, first: int, last: int) -> list[tuple[int, int]]:
        """(part, epoch) of the first and the last of some ordinals."""
        found = set[tuple[int, int]]()
        for number in (first // sum(self._weights), last // sum(self._weights)):
            for part, weight in enumerate(self._weights):
                ends = (number * weight, (number + 1) * weight - 1)
                found |= {(part, drawn // len(self._parts[part])) for drawn in ends}
        return sorted(found)

    def _order(self, part: int, epoch: int) -> np.ndarray:
        """Numbers of a part's items in the order of an epoch. Any thread may ask."""
        found = self._orders.get((part, epoch))
        if found is None:
            # A sort by keyed hashes rather than a shuffle: it is the same in every Python for ever.
            found = self._ranked(f"train {self._seed} {epoch}", self._parts[part])
            mine = sorted(kept for kept in self._orders if kept[0] == part)[1 - ORDERS_KEPT :]
            others = {kept: order for kept, order in self._orders.items() if kept[0] != part or kept in mine}
            self._orders = {**others, (part, epoch): found}  # A new one: another thread may read the old one.
        return found

    def _item(self, number: int) -> DataItem:
        item = self._items[number]
        return replace(item, id=self._ids[number]) if number in self._ids else item

    def _key(self, number: int) -> bytes:
        return f"id {self._ids[number]}".encode() if number in self._ids else self._items.key(number)

    def _hashes(self, numbers: np.ndarray) -> np.ndarray:
        """Hashes of the keys of items, (N,) of WORDS."""
        found: np.ndarray = self._items.key_hashes[numbers]
        for place, number in enumerate(numbers.tolist()) if self._ids else ():
            if number in self._ids:
                found[place] = np.frombuffer(hash_of(self._key(number)), WORDS)[0]
        return found

    def _ranked(self, purpose: str, numbers: np.ndarray) -> np.ndarray:
        """The numbers in an order that depends on the purpose and each item's key alone."""
        first, numbers = f"{purpose}\0".encode(), np.sort(numbers)
        hashes = b"".join([hash_of(first + key) for key in self._items.keys(numbers)])
        found = np.frombuffer(hashes, WORDS).copy()
        for place in np.flatnonzero(np.isin(numbers, list(self._ids))).tolist() if self._ids else ():
            found[place] = np.frombuffer(hash_of(first + self._key(int(numbers[place]))), WORDS)[0]
        ranked: np.ndarray = numbers[in_order(found)]
        return ranked

    def _not_excluded(self, numbers: np.ndarray, excluded: set[str]) -> np.ndarray:
        if not excluded:
            return numbers
        kept = [number for number in numbers.tolist() if not excluded & self._items[number].names()]
        return np.array(kept, np.int64)

    def _digest(self, heldout: np.ndarray) -> str:
        """32 hex digits over every item's part and all that it has; what the ledger holds a run to."""
        state = hashlib.blake2b(digest_size=HASH_BYTES)
        for part, numbers in (("heldout", heldout), ("train", self._train)):
            state.update(f"{part} {len(numbers)}\n".encode())
            state.update(np.ascontiguousarray(self._items.row_hashes[numbers]).tobytes())
        return state.hexdigest()


async def open_dataset(spec: RunSpec, aside: Aside = OPENING) -> Dataset:
    """The data of a run, opened in a thread; raises `Impossible` as `Dataset.open`."""
    spec = await with_local_data(spec)

    def read() -> Dataset:
        dataset = Dataset.open(spec.data, spec.seed, given=GivenForm.of(spec))
        dataset.prepare()
        dataset.open_sets(spec)
        if not spec.acts_in_environments and spec.trainer.warmup.steps:
            _ = dataset.warmup  # What takes long to find is known before rules ask for it.
        return dataset

    try:
        return await aside.run(partial(copy_context().run, read))  # which says how far it is
    except TooSlow as error:
        raise Impossible([problem("data.source", str(error), "name data that is read sooner")]) from error


def _of_set(name: str, found: KeyProblemView, spec: RunSpec) -> KeyProblemView:
    """A problem of other data under its own key; one of a prompt that is the run's keeps it."""
    if found.key.startswith("data.prompt") and spec.evaluation.data[name].prompt is None:
        return found.model_copy(update={"problem": f"evaluation.data.{name}: {found.problem}"})
    return found.model_copy(update={"key": found.key.replace("data.", f"evaluation.data.{name}.", 1)})


@lru_cache(maxsize=2)
def _read(
    source_class: type[DataSource], options: str, fingerprint: str, most: int, given: GivenForm | None
) -> tuple[PackedItems, dict[str, int]] | Impossible:
    """Items of a source and what it left out, or why there are none.

    Kept, as a run is checked and started in one process.
    """
    source = source_class.model_validate_json(options)
    try:
        items = bounded(source.items(), most)
        return PackedItems(given.checked(items) if given else with_questions(items)), source.left_out()
    except Impossible as error:
        return error


def forget_items() -> None:
    """Drops what was read of sources and is kept; a run that waits reads its own again when it starts."""
    _read.cache_clear()

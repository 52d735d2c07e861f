"""Data sets of many rows: the event loop goes on beside them, and memory has a few bytes of each."""

import asyncio
import json
import time
import tracemalloc

import pytest
from headrace_coordinator.api.submission.rules import LOCAL, problems_of
from headrace_coordinator.api.submission.submission import Submission
from headrace_coordinator.data import Dataset
from headrace_coordinator.data import dataset as datasets
from headrace_coordinator.data.dataset import LARGE, forget_items, open_dataset
from headrace_schema.spec import RunSpec
from scene import Scene, ends
from submission_parts import FLEET


@pytest.fixture
def rows_of(tmp_path):
    """Makes a spec on a file of so many rows, ten of them held out."""

    def make(count: int) -> RunSpec:
        path = tmp_path / "many.jsonl"
        rows = (
            {"question": f"What is {n} and {7 * n}?", "answer": str(8 * n), "level": n} for n in range(count)
        )
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        data = {"source": "jsonl", "options": {"path": str(path)}, "heldout": 10}
        return RunSpec.model_validate(
            {"steps": 1, "model": {"path": "m"}, "data": data, "reward": {"scorers": [{"name": "exact"}]}}
        )

    return make


@pytest.fixture
def many_rows(rows_of):
    """A spec on a file of many rows, and how many there are."""
    return rows_of(LARGE + 100), LARGE + 100


@pytest.mark.parametrize("more", ["plain", "warmup", "evaluation", "suite"])
async def test_the_event_loop_goes_on_while_a_large_data_set_is_submitted(many_rows, more):
    """Opening, all rules and what a started run asks first: none of it holds the loop for as long as rows take."""
    spec, count = many_rows
    fields = spec.model_dump(mode="json")
    fields["trainer"]["warmup"]["steps"] = 3 * (more == "warmup")
    if more == "evaluation":
        fields["evaluation"]["data"] = {"all": {"source": "jsonl", "options": spec.data.options}}
    if more == "suite":
        fields["data"]["heldout"] = 0
    spec = RunSpec.model_validate(fields)
    for _ in range(3):  # A busy machine may hold the loop once; rows that are read on it hold it each time.
        longest, seconds = await lag_of(spec, count - 10 if more == "warmup" else 0)
        if longest < max(0.1, seconds / 3):
            return
    pytest.fail(f"the loop stood still for {longest:.2f} s of {seconds:.2f} s")


async def lag_of(spec: RunSpec, examples: int) -> tuple[float, float]:
    """The longest time that the loop stood still while a run was checked, and how long that took, in seconds."""
    longest = 0.0
    forget_items()

    async def watch():
        nonlocal longest
        while True:
            due = time.perf_counter() + 0.005
            await asyncio.sleep(0.005)
            longest = max(longest, time.perf_counter() - due)

    watching = asyncio.create_task(watch())
    await asyncio.sleep(0)  # It is waiting by now: what blocks the loop from here on is measured.
    began = time.perf_counter()
    dataset = await open_dataset(spec)
    assert problems_of(Submission(spec, FLEET, dataset), LOCAL) == []
    assert dataset.ready(0, 100) and len(dataset.warmup.examples if examples else "") == examples
    seconds = time.perf_counter() - began
    await asyncio.sleep(0.02)
    watching.cancel()
    assert dataset.train_size == LARGE + 100 - spec.data.heldout
    return longest, seconds


async def test_orders_of_later_epochs_are_found_ahead_and_two_are_kept(many_rows):
    spec, _ = many_rows
    data = await open_dataset(spec)
    size = data.train_size
    assert data.ready(0, size - 1) and not data.ready(0, size)
    before = [data.train_item(ordinal) for ordinal in (0, size - 1)]
    data.prepare(size - 1, size)
    assert data.ready(size - 1, size) and len(data._orders) == 2
    data.prepare(2 * size, 2 * size)
    assert not data.ready(0, 0), "the oldest is found again where it is asked for"
    assert [data.train_item(ordinal) for ordinal in (0, size - 1)] == before


def test_a_step_finds_its_items_in_a_thread_where_there_are_many(monkeypatch):
    """Every order is found by `open` or `prepare`, whose callers use a thread: none as an item is asked for."""
    monkeypatch.setattr(datasets, "LARGE", 1)
    prepare, ranked, asked, inside = Dataset.prepare, Dataset._ranked, [], []

    def prepared(self, first=0, last=0):
        inside.append(1)
        prepare(self, first, last)
        inside.pop()

    def rank(self, purpose, numbers):
        if purpose.startswith("train"):
            asked.append(bool(inside))
        return ranked(self, purpose, numbers)

    monkeypatch.setattr(Dataset, "prepare", prepared)
    monkeypatch.setattr(Dataset, "_ranked", rank)
    ends(Scene(lambda _: asyncio.sleep(0), steps=8))
    assert len(asked) >= 3 and all(asked)


def test_rows_lie_in_files_and_not_in_memory(rows_of):
    spec = rows_of(count := 3000)  # Counting each allocation takes ten times as long as reading.
    forget_items()
    tracemalloc.start()
    try:
        data = Dataset.open(spec.data, 0)
        data.prepare()
        held, _ = tracemalloc.get_traced_memory()
        assert held / count < 200, "bytes a row"
        del data
        forget_items()
        left, _ = tracemalloc.get_traced_memory()
        assert left / count < 20, "given back"
    finally:
        tracemalloc.stop()

"""What data may be: as many items as memory has room for, and files whose opening ends."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Iterator
from typing import ClassVar

import pytest
from headrace_coordinator.data import DataItem, Dataset, DataSource
from headrace_coordinator.data import dataset as module
from headrace_coordinator.data.builtin import huggingface
from headrace_coordinator.data.dataset import forget_items, open_dataset
from headrace_coordinator.data.sources import SOURCES
from headrace_schema.problems import Impossible
from headrace_schema.sections.generating import DataSection
from headrace_schema.spec import RunSpec

SPEC = {
    "name": "a",
    "steps": 1,
    "model": {"path": "m"},
    "data": {"source": "copy_digits", "options": {"digits": 1}},
    "reward": {"scorers": [{"name": "exact"}]},
}


def told(section: DataSection) -> str:
    with pytest.raises(Impossible) as refused:
        Dataset.open(section, 0)
    return str(refused.value)


@pytest.fixture
def most(monkeypatch) -> int:
    monkeypatch.setattr(module, "MOST_ITEMS", 100)
    forget_items()
    yield 100
    forget_items()


class Endless(DataSource):
    """Items without an end; counts those that were asked for."""

    asked: ClassVar[int] = 0

    def items(self) -> Iterator[DataItem]:
        while True:
            Endless.asked += 1
            yield DataItem(f"question {Endless.asked}", "answer")


def test_a_source_without_an_end_is_read_to_the_bound_and_no_further(monkeypatch):
    monkeypatch.setattr(module, "open_source", lambda *_: Endless())
    forget_items()
    monkeypatch.setattr(Endless, "asked", 0)
    section = DataSection(source="endless")
    with pytest.raises(
        Impossible, match=r"^data\.source: holds more items than the 2,097,152 .*; name fewer"
    ):
        Dataset.open(section, 0, most=1000)
    assert Endless.asked == 1001
    forget_items()


@pytest.mark.parametrize(
    ("digits", "parts", "fits"), [(2, 1, True), (1, 10, True), (2, 2, False), (1, 11, False)]
)
def test_parts_of_a_mixture_count_together(digits, parts, fits):
    """64 parts of 100,000 items took 2.3 GB of the coordinator, and answers of seconds."""
    part = {"source": "copy_digits", "options": {"digits": digits}}
    section = DataSection(source="mixture", options={"parts": [part] * parts})
    forget_items()
    if fits:
        assert len(Dataset.open(section, 0, most=100)._items) == 100
    else:
        with pytest.raises(Impossible, match="more items than"):
            Dataset.open(section, 0, most=100)


@pytest.mark.parametrize(("sets", "fits"), [(9, True), (10, False)])
async def test_sets_of_an_evaluation_count_with_the_runs_own(most, sets, fits):
    data = {f"s{n}": {"source": "copy_digits", "options": {"digits": 1}} for n in range(sets)}
    spec = RunSpec.model_validate({**SPEC, "evaluation": {"data": data}})
    if fits:
        assert len((await open_dataset(spec)).sets) == sets
    else:
        with pytest.raises(Impossible, match=r"^evaluation\.data\.s9\.source: holds more items"):
            await open_dataset(spec)


@pytest.fixture
def pipe(tmp_path) -> str:
    """Whoever opens it waits for a writer, for ever."""
    path = tmp_path / "pipe.png"
    os.mkfifo(path)
    return str(path)


@pytest.mark.parametrize("source", ["jsonl", "parquet"])
@pytest.mark.parametrize("device", ["pipe", "/dev/zero"])
def test_only_files_are_opened(source, device, pipe):
    path = pipe if device == "pipe" else device
    assert "it is a pipe, a socket or a device, and no file" in told(
        DataSection(source=source, options={"path": path})
    )


def test_an_image_that_is_a_pipe_is_not_opened(tmp_path, pipe):
    rows = tmp_path / "rows.jsonl"
    rows.write_text('{"question": "q", "answer": "a", "image": "pipe.png"}\n')
    section = DataSection(source="jsonl", options={"path": str(rows), "images": "image"})
    assert "it is a pipe, a socket or a device, and no file" in told(section)


@pytest.mark.parametrize(("files", "fits"), [(3, True), (4, False)])
def test_a_folder_is_looked_through_to_a_bound(monkeypatch, tmp_path, files, fits):
    """`dataset: /` walked through all disks of the machine."""
    monkeypatch.setattr(huggingface, "MOST_FILES", 3)
    for number in range(files):
        (tmp_path / f"{number}").touch()
    source = SOURCES.find("huggingface").options.model_validate({"dataset": str(tmp_path)})
    if fits:
        assert source.fingerprint()
    else:
        with pytest.raises(Impossible, match=r"^data\.options\.dataset: .* more than 3 files"):
            source.fingerprint()


@pytest.mark.parametrize("digits", [6, 9, 2**31])
def test_generated_items_are_refused_before_they_are_made(digits):
    tracemalloc.start()
    assert "data.options.digits: must be at most 5" in told(
        DataSection(source="copy_digits", options={"digits": digits})
    )
    assert tracemalloc.get_traced_memory()[1] < 4 << 20
    tracemalloc.stop()

"""Items of a Hugging Face data set: from the hub (HF_ENDPOINT, HF_TOKEN and HF_HOME apply) or a local directory.

The `datasets` package is an extra and slow to import, so it is imported when a run asks for it.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

from headrace_schema.problems import Impossible, choose, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.builtin.rows import RowSource
from headrace_coordinator.data.items import DataItem

DATASET_KEY = "data.options.dataset"
MOST_FILES = 100_000
"""Of a local directory."""


class HuggingFace(RowSource):
    """The rows of one split, in their order. Name a `revision`, so that the items of tomorrow are today's."""

    dataset: str = Field(description="an id such as openai/gsm8k, or a local directory, also of save_to_disk")
    name: str | None = Field(default=None, description="configuration of the data set, such as main")
    split: str = Field(default="train", description="split, also a slice such as train[:1000]")
    revision: str | None = Field(default=None, description="commit, tag or branch of the hub's repository")

    @override
    def fingerprint(self) -> str:
        """Names, times and sizes of a local directory's files; nothing for the hub, where the revision decides."""
        folder = Path(os.path.expanduser(self.dataset))
        inside = islice(folder.rglob("*"), MOST_FILES + 1) if folder.is_dir() else ()
        if len(found := [*inside]) > MOST_FILES:
            reason = f"the folder {folder} holds more than {MOST_FILES:,} files and folders"
            raise Impossible([problem(DATASET_KEY, reason, "name the folder of the data set itself")])
        files = sorted(file for file in found if file.is_file())
        states = [(file.relative_to(folder), file.stat()) for file in files]
        return " ".join(f"{name}-{state.st_mtime_ns}-{state.st_size}" for name, state in states)

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields an item a row; ill-formed rows are named by their number, from 0 as the hub's viewer counts."""
        return self.row_items(
            enumerate(self._rows()),
            lambda number: f"row {number} of {self.dataset} ({self.split})",
            DATASET_KEY,
            Path(os.path.expanduser(self.dataset)),
        )

    def _rows(self) -> Any:
        datasets = _datasets()
        local = Path(os.path.expanduser(self.dataset))
        where = str(local) if local.is_dir() else self.dataset
        try:
            found = _saved(datasets, local, self.split)
            if found is None:
                found = datasets.load_dataset(
                    where, self.name, split=self.split, revision=None if local.is_dir() else self.revision
                )
            return _with_files(datasets, found)
        except datasets.exceptions.DatasetNotFoundError as error:
            fix = "check the id, the revision and HF_TOKEN, or name a local directory"
            raise Impossible([problem(DATASET_KEY, _one_line(error), fix)]) from error
        except (ValueError, OSError, datasets.exceptions.DatasetsError) as error:
            raise Impossible([self._explained(datasets, where, error)]) from error

    def _explained(self, datasets: Any, where: str, error: Exception) -> Any:
        """The option that does not fit, with what the data set offers; else the library's own words."""
        text = _one_line(error)
        if "Unknown split" in text:
            known = text.rpartition("[")[2].partition("]")[0].replace("'", "").replace('"', "")
            names = [name.strip() for name in known.split(",") if name.strip()]
            return problem("data.options.split", text, choose(self.split, names))
        if "BuilderConfig" in text or "Config name is missing" in text:
            return problem("data.options.name", text, "set it to one of those")
        return problem(DATASET_KEY, text, "check the id and the connection, or name a local directory")


def _saved(datasets: Any, folder: Path, split: str) -> Any:
    """The rows that `save_to_disk` wrote into a folder, one split or several; None where it wrote none.

    Raises ValueError for a split that is not there.
    """
    if (folder / "state.json").is_file():
        found = datasets.load_from_disk(str(folder))
        name = split.partition("[")[0]  # It is one split, whatever its name.
    elif (folder / "dataset_dict.json").is_file():
        every = datasets.load_from_disk(str(folder))
        name = split.partition("[")[0]
        if name not in every:
            raise ValueError(f"Unknown split {name!r}. Should be one of {sorted(every)}.")
        found = every[name]
    else:
        return None
    (part,) = datasets.ReadInstruction.from_spec(split).to_absolute({name: len(found)})
    start, end = part.from_ or 0, len(found) if part.to is None else part.to
    return found.select(range(start, end))


def _with_files(datasets: Any, rows: Any) -> Any:
    """The rows with the files of their images: decoded ones would be written anew."""
    for name, feature in rows.features.items():
        inner = getattr(feature, "feature", None)
        for kind in (datasets.Image, datasets.Video, datasets.Audio):
            if isinstance(feature, kind):
                rows = rows.cast_column(name, kind(decode=False))
            elif isinstance(inner, kind):
                rows = rows.cast_column(name, datasets.List(kind(decode=False)))
    return rows


def _one_line(error: Exception) -> str:
    return " ".join(str(error).split())[:500] or type(error).__name__


def _datasets() -> Any:
    try:
        import datasets
    except ImportError as error:
        reason = f"the data source huggingface needs a package that is not installed ({error})"
        fix = "pip install 'headrace-coordinator[datasets]'"
        raise Impossible([problem("data.source", reason, fix)]) from error
    datasets.disable_progress_bars()
    return datasets

"""Items from Parquet files. pyarrow is an extra, imported when a run asks for it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_schema.problems import Impossible, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.builtin.rows import RowSource
from headrace_coordinator.data.items import DataItem

PATH_KEY = "data.options.path"
ROWS = 1024  # read at once: memory is bounded by a batch, not by a file


class Parquet(RowSource):
    """One file, or all files of a folder that end in .parquet, in the order of their names."""

    path: str = Field(description="a .parquet file or a folder of them, as the coordinator sees it")

    @override
    def fingerprint(self) -> str:
        """Names, times and sizes of the files."""
        try:
            states = [(file.name, file.stat()) for file in self._files()]
        except (OSError, Impossible):
            return "unreadable"
        return " ".join(f"{name}-{state.st_mtime_ns}-{state.st_size}" for name, state in states)

    @override
    def items(self) -> Iterator[DataItem]:
        """Yields an item a row; ill-formed rows are named by file and number."""
        pq = _pyarrow()
        for file in self._files():
            for number, row in enumerate(self._rows(pq, file), 1):
                if item := self.row_item(row, f"row {number} of {file}", PATH_KEY):
                    yield item

    def _rows(self, pq: Any, file: Path) -> Iterator[dict[str, Any]]:
        from pyarrow import ArrowException

        try:
            with pq.ParquetFile(file) as table:
                for batch in table.iter_batches(batch_size=ROWS):
                    yield from batch.to_pylist()
        except (OSError, ArrowException) as error:
            fix = "name a readable .parquet file or a folder of them"
            raise Impossible([problem(PATH_KEY, f"{file} is no Parquet file ({error})", fix)]) from error

    def _files(self) -> list[Path]:
        path = Path(self.path).expanduser()
        found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not found:
            fix = "put .parquet files there, or name another path"
            raise Impossible([problem(PATH_KEY, f"the folder {path} has no .parquet file", fix)])
        return found


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        reason = f"the data source parquet needs a package that is not installed ({error})"
        fix = "pip install 'headrace-coordinator[datasets]'"
        raise Impossible([problem("data.source", reason, fix)]) from error
    return pq

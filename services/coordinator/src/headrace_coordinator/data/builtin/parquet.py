"""Items from Parquet files. pyarrow is an extra, imported when a run asks for it."""

from __future__ import annotations

import os
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

from headrace_schema.problems import Impossible, problem
from pydantic import Field
from typing_extensions import override

from headrace_coordinator.data.builtin.rows import RowSource
from headrace_coordinator.data.builtin.values import file_of
from headrace_coordinator.data.items import DataItem

PATH_KEY = "data.options.path"
ROWS, IMAGE_ROWS = 1024, 64  # read at once: memory is bounded by a batch, not by a file


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
            rows = enumerate(self._rows(pq, file), 1)
            yield from self.row_items(rows, partial(_place, file), PATH_KEY, file.parent)

    def _rows(self, pq: Any, file: Path) -> Iterator[dict[str, Any]]:
        from pyarrow import ArrowException

        try:
            with pq.ParquetFile(file_of(file)) as table:
                first = 1
                for batch in table.iter_batches(batch_size=IMAGE_ROWS if self.files else ROWS):
                    yield from self._values(batch, file, first)
                    first += len(batch)
        except (OSError, ArrowException) as error:
            fix = "name a readable .parquet file or a folder of them"
            raise Impossible([problem(PATH_KEY, f"{file} is no Parquet file ({error})", fix)]) from error

    def _values(self, batch: Any, file: Path, first: int) -> list[dict[str, Any]]:
        """The rows of a batch, whose first one has the number `first`, as Python's values."""
        from pyarrow import ArrowException

        try:
            columns = [_column_values(column) for column in batch.columns]
        except (ValueError, ArithmeticError, LookupError, ArrowException) as error:
            # Text that is no UTF-8, a date beyond Python's, an unknown time zone: to_pylist does not say of what.
            row, column, reason = _unreadable(batch, error)
            fix = "mend the value, or write the column as text"
            self.wrong(
                PATH_KEY, f"row {first + row} of {file}", f"has no readable {column!r} ({reason})", fix
            )
        names = batch.schema.names
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _files(self) -> list[Path]:
        path = Path(os.path.expanduser(self.path))
        found = sorted(path.glob("*.parquet")) if path.is_dir() else [path]
        if not found:
            fix = "put .parquet files there, or name another path"
            raise Impossible([problem(PATH_KEY, f"the folder {path} has no .parquet file", fix)])
        return found


def read_rows(file: Path, columns: list[str]) -> list[dict[str, Any]]:
    """The rows of a small file, of those of these columns that it has. Raises Impossible."""
    pq = _pyarrow()
    from pyarrow import ArrowException

    try:
        known = pq.ParquetFile(file).schema_arrow.names
        rows: list[dict[str, Any]] = pq.read_table(
            file, columns=[name for name in columns if name in known]
        ).to_pylist()
    except (OSError, ArrowException) as error:
        fix = "name a readable .parquet file or a folder of them"
        raise Impossible([problem(PATH_KEY, f"{file} is no Parquet file ({error})", fix)]) from error
    return rows


def _place(file: Path, number: int) -> str:
    return f"row {number} of {file}"


def _column_values(column: Any) -> list[Any]:
    """A column as Python's values. Texts and numbers go by way of numpy, which takes a fifth of the time."""
    from pyarrow import types

    kind = column.type
    numbers = types.is_integer(kind) or types.is_float32(kind) or types.is_float64(kind)
    if types.is_string(kind) or types.is_large_string(kind) or (numbers and not column.null_count):
        values: list[Any] = column.to_numpy(zero_copy_only=False).tolist()
        return values
    found: list[Any] = column.to_pylist()
    return found


def _unreadable(batch: Any, error: Exception) -> tuple[int, str, Exception]:
    """Row, column and error of the first value that Python cannot hold; `error` is that of the whole batch."""
    for name, column in zip(batch.schema.names, batch.columns, strict=True):
        for row in range(len(column)):
            try:
                column[row].as_py()
            except (ValueError, ArithmeticError, LookupError) as found:
                return row, name, found
    return 0, "values", error


def _pyarrow() -> Any:
    try:
        import pyarrow.parquet as pq
    except ImportError as error:
        reason = f"the data source parquet needs a package that is not installed ({error})"
        fix = "pip install 'headrace-coordinator[datasets]'"
        raise Impossible([problem("data.source", reason, fix)]) from error
    return pq

"""What a large data set costs the coordinator: `python benchmarks/data.py [--rows N]`.

Writes a Parquet file of questions with answers, opens it in a thread as a submission does, and gives it back. Prints
one JSON line: `rows_per_s` (rows read, told apart, split and ordered, a second), `bytes_per_row` (resident memory while
it is open), `left_bytes_per_row` (after it was closed) and `loop_lag_s` (the longest time in which the loop beside
it did nothing else).
"""

from __future__ import annotations

import argparse
import asyncio
import ctypes
import gc
import tempfile
import time
from pathlib import Path

import psutil
import pyarrow as pa
import pyarrow.parquet as pq
from _harness import emit, machine, say
from headrace_coordinator.data.dataset import forget_items, open_dataset
from headrace_schema.spec import RunSpec

ROWS, HELDOUT = 1_000_000, 1000
LOOK_S = 0.005


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", type=int, default=ROWS, help="rows of the file")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "rows.parquet"
        write(path, options.rows)
        emit("data", asyncio.run(opened(path, options.rows)))


def write(path: Path, rows: int) -> None:
    """A file of `rows` rows with four columns, written piece by piece."""
    schema = pa.schema(
        [("question", "string"), ("answer", "string"), ("source", "string"), ("level", "int64")]
    )
    with pq.ParquetWriter(path, schema) as writer:
        for first in range(0, rows, 100_000):
            numbers = range(first, min(first + 100_000, rows))
            columns = {
                "question": [
                    f"What is {n} and {7 * n}? Explain each step of the sum in words." for n in numbers
                ],
                "answer": [str(8 * n) for n in numbers],
                "source": ["made"] * len(numbers),
                "level": list(numbers),
            }
            writer.write_table(pa.table(columns, schema=schema))


async def opened(path: Path, rows: int) -> dict[str, float]:
    """The figures of one opening and closing."""
    warm = path.with_name("warm.parquet")
    write(warm, 2 * HELDOUT)
    await open_dataset(spec_of(warm))  # What the first one imports is not counted.
    before, lags = resident(), Lags()
    watch = asyncio.create_task(lags.watch())
    await asyncio.sleep(0)  # It is waiting by now.
    began = time.perf_counter()
    dataset = await open_dataset(spec_of(path))
    seconds = time.perf_counter() - began
    await asyncio.sleep(2 * LOOK_S)
    watch.cancel()
    assert dataset.train_size == rows - HELDOUT
    held = resident() - before
    del dataset
    forget_items()
    figures = {
        "rows_per_s": rows / seconds,
        "bytes_per_row": held / rows,
        "left_bytes_per_row": (resident() - before) / rows,
        "loop_lag_s": lags.longest_s,
    }
    say(f"{rows:,} rows in {seconds:.1f} s")
    return figures


def spec_of(path: Path) -> RunSpec:
    """A run on the file's rows, of which HELDOUT are held out."""
    data = {"source": "parquet", "options": {"path": str(path)}, "heldout": HELDOUT}
    return RunSpec.model_validate(
        {"steps": 1, "model": {"path": "m"}, "data": data, "reward": {"scorers": [{"name": "exact"}]}}
    )


class Lags:
    """How long the event loop did not come to what was due."""

    longest_s = 0.0

    async def watch(self) -> None:
        """Looks every LOOK_S until it is cancelled."""
        while True:
            due = time.perf_counter() + LOOK_S
            await asyncio.sleep(LOOK_S)
            self.longest_s = max(self.longest_s, time.perf_counter() - due)


def resident() -> int:
    """Resident bytes of this process, without what the allocators could give back."""
    gc.collect()
    pa.default_memory_pool().release_unused()
    ctypes.CDLL("libc.so.6").malloc_trim(0)
    return int(psutil.Process().memory_info().rss)


if __name__ == "__main__":
    main()

"""The rows of memory_at_size.py: figures, a file, and the table of docs/at-size.md. Measures nothing."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

SIZES = ("qwen2.5-7b", "qwen2.5-32b", "llama-3-70b", "qwen3-30b-a3b")
EXPERTS = "experts"
TRAINED = {"all": "all", "lora": "LoRA", EXPERTS: "all, experts over 8"}
GIB = 2**30
HEAD = (
    "model", "GPUs", "trained", "layout", "GPU GiB, planned", "measured", "host GiB",
    "a micro-batch: collectives, GiB", "to and from the host", "a commit: collectives", "to and from the host",
)  # fmt: skip
Row = dict[str, Any]


def figures(rows: list[Row]) -> dict[str, float]:
    """Of the JSON line."""
    found: dict[str, float] = {}
    for row in rows:
        if "measured" not in row:
            continue
        own = {
            "planned_gib": sum(row["device"].values()) / GIB,
            "measured_gib": row["measured"] / GIB,
            "planned_host_gib": row["planned_host"] / GIB,
            "measured_host_gib": row["measured_host"] / GIB,
            "micro_collectives": sum(row["micro-batch calls"].values()),
            "micro_gib": row["micro-batch moved"] / GIB,
            "commit_collectives": sum(row["commit calls"].values()),
            "commit_gib": row["commit moved"] / GIB,
        }
        found |= {f"{name_of(row)}_{name}": value for name, value in own.items()}
    return found


def name_of(row: Row) -> str:
    """Of its figures."""
    return f"{row['model']}_{row['ranks']}_{row['kind']}"


def cells(row: Row) -> tuple[str, ...]:
    """Of the table."""
    first = row["model"], str(row["ranks"]), TRAINED[row["kind"]]
    if "refused" in row:
        return (*first, f"fits in none: {row['refused'].splitlines()[0]}", *["-"] * len(HEAD[4:]))
    measured = "measured" in row
    host = f"{row['host_of_all'] / GIB:.0f}" + (", saves in place" if row["saves_in_place"] else "")
    found = ["-"] * 4
    if measured:
        found = [
            *(f"{row[f'micro-batch {what}'] / GIB:.1f}" for what in ("moved", "carried")),
            *(f"{row[f'commit {what}'] / GIB:.1f}" for what in ("moved", "carried")),
        ]
    return (
        *first,
        row["layout"],
        f"{sum(row['device'].values()) / GIB:.1f}",
        f"{row['measured'] / GIB:.1f}" if measured else "-",
        host,
        *found,
    )


def read(file: Path) -> list[Row]:
    """The rows of a file; none where there is none."""
    rows: list[Row] = json.loads(file.read_text(encoding="utf-8")) if file.exists() else []
    return rows


def text_of(rows: list[Row]) -> str:
    """The rows as a file has them, in the order in which all are measured."""
    kinds = list(TRAINED)
    rows = sorted(rows, key=lambda row: (SIZES.index(row["model"]), kinds.index(row["kind"]), row["ranks"]))
    return "[\n" + ",\n".join(json.dumps(row) for row in rows) + "\n]\n"


def markdown(rows: list[Row]) -> str:
    """The rows as a table; rows that differ only in the number of GPUs are one."""
    lines = [HEAD, tuple("---" for _ in HEAD)]
    for line in map(cells, rows):
        if lines[-1][:1] + lines[-1][2:] == line[:1] + line[2:]:
            line = (line[0], f"{lines.pop()[1]}, {line[1]}", *line[2:])
        lines.append(line)
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)

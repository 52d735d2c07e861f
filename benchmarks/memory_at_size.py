"""The memory plan against the trainer's own step, up to 70B on 64 GPUs: `python benchmarks/memory_at_size.py`.

Of each model, number of ranks and kind of training (all weights, adapters of rank 16) the trainer chooses a layout for
GPUs of 80 GB. One rank then goes through restore, micro-batches, commit, publication, checkpoint, suspend and wake on
fake tensors (`tools/fake_world`): what is alive at its peak is compared with the plan, and collectives are counted.
Needs no GPU and no weights. A rank's micro-batch has 8,192 tokens in rows of 2,048.

`worst_plan_error` is the largest |planned / measured - 1| of all rows. A row's figures begin with its name, such as
`qwen2.5-7b_8_all`: planned and measured GiB of a GPU and planned of the host, collectives and GiB moved by a
micro-batch and by a commit. `--rows FILE` writes the rows as a table of Markdown.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from _harness import emit, machine, say, table
from headrace_fake_world.device import NAME
from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, Measured, measure, planned
from headrace_fake_world.tracker import Phase
from headrace_trainer.errors import Refusal

SIZES = ("qwen2.5-7b", "qwen2.5-32b", "llama-3-70b", "qwen3-30b-a3b")
RANKS = (1, 8, 32, 64)
KINDS: dict[str, dict[str, Any]] = {"all": {}, "lora": {"lora": {"rank": 16}}}
GIB = 2**30
HEAD = (
    "model", "GPUs", "trained", "layout", "planned GiB", "measured GiB", "error", "host GiB",
    "micro-batch: collectives", "GiB moved", "commit: collectives", "GiB moved",
)  # fmt: skip


def main() -> None:
    """Command line."""
    options = parse()
    say(machine())
    figures: dict[str, float] = {}
    rows: list[tuple[str, ...]] = [HEAD]
    errors: list[float] = []
    for model in options.models:
        for ranks in options.ranks:
            for kind in options.kinds:
                case = Case(model, ranks, trainer=KINDS[kind])
                try:
                    found = measure(case)
                except Refusal as refusal:
                    say(f"{model} on {ranks}, {kind}: {refusal.message}")
                    rows.append((model, str(ranks), kind, "fits in none", *["-"] * len(HEAD[4:])))
                    continue
                _, plan = planned(case)
                name, error = f"{model}_{ranks}_{kind}", sum(plan.device.values()) / found.peak() - 1
                errors.append(abs(error))
                figures |= row_figures(name, sum(plan.device.values()), sum(plan.host.values()), found)
                rows.append(row(case, kind, sum(plan.device.values()), sum(plan.host.values()), found))
                say(f"{' | '.join(rows[-1])} ({found.seconds:.0f} s)")
    table(rows[0], rows[1:])
    if options.rows:
        options.rows.write_text(markdown(rows), encoding="utf-8")
    emit("memory_at_size", {"worst_plan_error": max(errors, default=None), **figures})


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=SIZES, choices=sorted(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=KINDS)
    parser.add_argument("--rows", type=Path, help="write the rows here, as a table of Markdown")
    return parser.parse_args()


def row_figures(name: str, device: int, host: int, found: Measured) -> dict[str, float]:
    """Of a row."""
    micro, commit = found.phases["micro-batch"], found.phases["commit"]
    return {
        f"{name}_planned_gib": device / GIB,
        f"{name}_measured_gib": found.peak() / GIB,
        f"{name}_host_gib": host / GIB,
        f"{name}_micro_collectives": sum(micro.calls.values()),
        f"{name}_micro_gib": sum(micro.moved.values()) / GIB,
        f"{name}_commit_collectives": sum(commit.calls.values()),
        f"{name}_commit_gib": sum(commit.moved.values()) / GIB,
    }


def row(case: Case, kind: str, device: int, host: int, found: Measured) -> tuple[str, ...]:
    """Of the table."""
    micro, commit = found.phases["micro-batch"], found.phases["commit"]
    peak = found.peak(NAME)
    return (
        *(case.model, str(case.ranks), kind, str(found.layout)),
        *(f"{device / GIB:.1f}", f"{peak / GIB:.1f}", f"{device / peak - 1:+.1%}", f"{host / GIB:.0f}"),
        *(calls(micro), f"{sum(micro.moved.values()) / GIB:.1f}"),
        *(calls(commit), f"{sum(commit.moved.values()) / GIB:.1f}"),
    )


def calls(phase: Phase) -> str:
    """How many collectives of each kind."""
    return ", ".join(f"{count} {kind}" for kind, count in sorted(phase.calls.items())) or "none"


def markdown(rows: list[tuple[str, ...]]) -> str:
    """The rows as a table."""
    lines = [rows[0], tuple("---" for _ in rows[0]), *rows[1:]]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


if __name__ == "__main__":
    main()

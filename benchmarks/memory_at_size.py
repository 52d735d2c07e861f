"""The memory plan against the trainer's own step, up to 70B on 64 GPUs: `python benchmarks/memory_at_size.py`.

Of each model, number of ranks and kind of training (all weights, adapters of rank 16, experts divided over eight ranks)
the trainer chooses a layout for GPUs of 80 GB. One rank then goes through restore, micro-batches, commit, publication,
checkpoint, suspend and wake on fake tensors (`tools/fake_world`): what is alive at its peak is compared with the plan,
and collectives are counted. Needs no GPU and no weights. A rank's micro-batch has 8,192 tokens in rows of 2,048.

`worst_plan_error` is the largest |planned / measured - 1| of all rows' GPUs, `worst_host_error` that of a rank's host
memory. A row's figures begin with its name, such as `qwen2.5-7b_8_all`: planned and measured GiB of a GPU and of a
rank's own host memory, collectives and GiB moved by a
micro-batch and by a commit. `--rows FILE` keeps the rows that it measures in a JSON file, in place of those of the same
name; `data/memory_at_size.json` is the one behind docs/at-size.md, whose table `--table FILE` prints.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from _harness import emit, machine, say
from _memory_rows import EXPERTS, SIZES, Row, cells, figures, markdown, name_of, read, text_of
from headrace_fake_world.device import NAME
from headrace_fake_world.models import MODELS
from headrace_fake_world.step import Case, Measured, measure, planned
from headrace_fake_world.tracker import Phase
from headrace_trainer.backends.fsdp.layouts.layout import GPUS_PER_HOST, Layout
from headrace_trainer.errors import Refusal
from headrace_trainer.memory import LEADERS, MemoryPlan, host_bytes

RANKS = (1, 8, 32, 64)
KINDS: dict[str, dict[str, Any]] = {
    "all": {},
    "lora": {"lora": {"rank": 16}},
    EXPERTS: {"backend_options": {"expert_parallel": GPUS_PER_HOST}},
}
GOAL = 0.1
"""Of `worst_plan_error`."""


def main() -> None:
    """Command line."""
    options = parse()
    if options.table:
        print(markdown(read(options.table)), end="")
        return
    if options.plan:
        plan_anew(options)
        return
    say(machine())
    rows: list[Row] = []
    for case, kind in cases(options):
        row = measured_row(case, kind)
        rows.append(row)
        say(" | ".join(cells(row)) + (f" ({row['seconds']:.0f} s)" if "seconds" in row else ""))
        if options.rows:
            known = {name_of(each): each for each in read(options.rows)} | {name_of(row): row}
            options.rows.write_text(text_of(list(known.values())), encoding="utf-8")
    errors = [abs(row["error"]) for row in rows if "error" in row]
    worst = max(errors, default=0.0)
    host = max(
        (abs(row["planned_host"] / row["measured_host"] - 1) for row in rows if "error" in row), default=0.0
    )
    emit("memory_at_size", {"worst_plan_error": worst, "worst_host_error": host, **figures(rows)})
    if options.check and worst > GOAL:
        sys.exit(f"the plan is off by {worst:.1%}; the goal is {GOAL:.0%}")


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--models", nargs="+", default=SIZES, choices=sorted(MODELS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=KINDS)
    parser.add_argument("--rows", type=Path, help="keep the rows in this JSON file")
    parser.add_argument(
        "--plan", action="store_true", help="plan the rows of --rows anew, and measure nothing"
    )
    parser.add_argument("--check", action="store_true", help="fail where a plan is further off than the goal")
    parser.add_argument(
        "--table", type=Path, help="print the rows of this file as a table, and measure nothing"
    )
    return parser.parse_args()


def cases(options: argparse.Namespace) -> Iterator[tuple[Case, str]]:
    """Those that can be: experts are divided where a model has some and as many ranks are there."""
    for model in options.models:
        for kind in options.kinds:  # the sizes of a model are found once for all ranks
            for ranks in options.ranks:
                if kind != EXPERTS or ("num_experts" in MODELS[model] and ranks % GPUS_PER_HOST == 0):
                    yield Case(model, ranks, trainer=KINDS[kind]), kind


def plan_anew(options: argparse.Namespace) -> None:
    """Plans all cases; what was measured in the same layout stays."""
    known = {name_of(row): row for row in read(options.rows)}
    rows: list[Row] = []
    for case, kind in cases(options):
        row, _, _ = planned_row(case, kind)
        before = known.get(name_of(row), {})
        if "measured" in before and before["layout"] == row.get("layout"):
            device = sum(row["device"].values())
            row = before | row | {"error": device / before["measured"] - 1}
        rows.append(row)
        say(" | ".join(cells(row)))
    options.rows.write_text(text_of(rows), encoding="utf-8")


def planned_row(case: Case, kind: str) -> tuple[Row, Layout | None, MemoryPlan | None]:
    """What a case needs by the plan, or why it fits nowhere."""
    row: Row = {"model": case.model, "ranks": case.ranks, "kind": kind}
    try:
        layout, plan = planned(case)
    except Refusal as refusal:
        return row | {"refused": refusal.message}, None, None
    row |= {
        "layout": short(layout, case.ranks),
        "reason": plan.reason,
        "saves_in_place": plan.saves_in_place,
        "device": dict(plan.device),
        "host": dict(plan.host),
        "host_of_all": host_bytes(plan, min(case.ranks, GPUS_PER_HOST)),
        "planned_host": own_host(plan),
    }
    return row, layout, plan


def measured_row(case: Case, kind: str) -> Row:
    """What a case needs and moves, or why it fits nowhere."""
    row, layout, plan = planned_row(case, kind)
    if layout is None or plan is None:
        return row
    found = measure(replace(case, layout=layout, saves_in_place=plan.saves_in_place))
    device = sum(plan.device.values())
    return row | {
        "measured": found.peak(),
        "peak_in": found.at_peak()[0],
        "peak": found.at_peak()[1],
        "measured_host": found.peak("cpu"),
        "error": device / found.peak() - 1,
        **moves(found, "micro-batch"),
        **moves(found, "commit"),
        "seconds": round(found.seconds, 1),
    }


def own_host(plan: MemoryPlan) -> int:
    """Bytes of a rank's process: what only the leader has lies in memory that is no tensor's."""
    return sum(size for part, size in plan.host.items() if part not in LEADERS)


def moves(found: Measured, name: str) -> Row:
    """Collectives and bytes of a phase."""
    phase = found.phases[name]
    return {
        f"{name} calls": dict(sorted(phase.calls.items())),
        f"{name} moved": sum(phase.moved.values()),
        f"{name} carried": carried(phase),
    }


def carried(phase: Phase) -> int:
    """Bytes between the GPU and its host, small figures aside."""
    return sum(size for way, size in phase.carried.items() if NAME in way)


def short(layout: Layout, ranks: int) -> str:
    """The number of a layout in docs/at-size.md's first table, and the ranks that hold a copy where not all do."""
    number = {"state": 1, "gradients": 2, "weights": 3}[layout.shard] + layout.checkpointing
    number = {"none": number, "optimizer": 5, "parameters": 6}[layout.offload]
    return str(number) if layout.shard_ranks == ranks else f"{number}, a copy on {layout.shard_ranks}"


if __name__ == "__main__":
    main()

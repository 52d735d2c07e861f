"""The memory plan of large robot policies against the trainer's own step: `python benchmarks/vla_at_size.py`.

As memory_at_size.py, for OpenVLA-OFT 7B, π0, π0.5, SmolVLA, ACT and a diffusion policy on 1 to 8 GPUs of 80 GB: the
trainer chooses a layout, one rank goes through a step on fake tensors (`tools/fake_world`). Needs no GPU and no
weights. A rank's micro-batch has 8,192 tokens: 13 chunks of OFT with two cameras.

`worst_plan_error` is the largest |planned / measured - 1| of a GPU; a row's figures begin with its name, such as
`openvla-oft-7b_8_lora`. `--check` fails above a tenth, where that is more than half a GiB: of a small policy's plan a
tenth is nothing that an allocator would notice.
"""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from _harness import emit, machine, say
from _memory_rows import GIB, cells, figures
from headrace_fake_world.robots import ROBOTS
from headrace_fake_world.step import Case
from memory_at_size import GOAL, measured_row

POLICIES = ("openvla-oft-7b", "pi0-3b", "pi05-3b", "smolvla-450m", "act-52m", "diffusion-260m")
RANKS = (1, 2, 4, 8)
SMALL_GIB = 0.5
KINDS: dict[str, dict[str, Any]] = {"all": {}, "lora": {"lora": {"rank": 32}}}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--policies", nargs="+", default=POLICIES, choices=sorted(ROBOTS))
    parser.add_argument("--ranks", nargs="+", type=int, default=RANKS)
    parser.add_argument("--kinds", nargs="+", default=tuple(KINDS), choices=KINDS)
    parser.add_argument("--check", action="store_true", help="fail where a plan is further off than the goal")
    options = parser.parse_args()
    say(machine())
    rows = []
    for policy in options.policies:
        for kind in options.kinds:  # the sizes of a policy are found once for all ranks
            for ranks in options.ranks:
                row = measured_row(Case(policy, ranks, trainer=KINDS[kind]), kind)
                rows.append(row)
                say(" | ".join(cells(row)))
    worst = max((abs(row["error"]) for row in rows if "error" in row), default=0.0)
    emit("vla_at_size", {"worst_plan_error": worst, **figures(rows)})
    off = [
        row
        for row in rows
        if abs(row.get("error", 0.0)) > GOAL and abs(row["error"]) * row["measured"] > SMALL_GIB * GIB
    ]
    if options.check and off:
        sys.exit(f"{len(off)} plans are off by more than {GOAL:.0%} and {SMALL_GIB} GiB")


if __name__ == "__main__":
    main()

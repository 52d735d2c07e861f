"""How long new weights would take at size, by legs: `python benchmarks/weights_at_size.py`.

**Nothing of it has run on a GPU.** Bytes are counted: those that a trainer's leader gathers and takes down to the host
by its own code on imaginary GPUs (`tools/fake_world`), those that an engine's worker uploads and exchanges by its own
code on tensors without memory. Rates of links are assumed (`RATES`); those of one thread were measured, on the machine
that the data names. Times are bytes over rates, and of what overlaps the longest.

The figures are the planned seconds of each case, beside its goal. `--count FILE` counts bytes and measures threads
anew (minutes); `data/weights_at_size.json` is the one behind docs/weights.md, whose table `--table` prints; `--check`
fails where a goal is missed.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tools" / "fake_world"))

from _harness import emit, machine, say
from _thread_rates import thread_rates

DATA = Path(__file__).parent / "data" / "weights_at_size.json"
GPUS_PER_HOST = 8
THREADS = 16
"""Of a process that casts or verifies; a host has more cores."""
RATES = {"nvlink": 300.0, "pcie": 50.0, "network": 50.0, "memory": 300.0, "gpu": 2000.0}
"""GB/s, assumed: of a GPU to its neighbours, to pinned host memory, of a host to others; a host's memory; a GPU's."""
TOUCHES = {"cast": 3, "verify": 1, "stage": 3, "arrive": 3}
"""How often a leg reads or writes a byte in the host's memory."""
TENSOR_S = 1e-4
"""Assumed: what a loader of vLLM's or SGLang's does for a tensor before its bytes matter."""
CALLS_S = 0.1
"""Assumed: calls between the services, and vLLM's layerwise reload."""


@dataclass(frozen=True)
class Case:
    """A model on hosts of eight GPUs; its engines have `tensor_parallel` workers. `goal`: seconds."""

    name: str
    model: str
    hosts: int
    tensor_parallel: int
    goal: float

    @property
    def ranks(self) -> int:
        """Of the trainer."""
        return self.hosts * GPUS_PER_HOST


CASES = (
    Case("7B, one node", "qwen2.5-7b", 1, 1, 2.0),
    Case("30B-A3B, one node", "qwen3-30b-a3b", 1, 2, 8.0),
    Case("70B, one node", "llama-3-70b", 1, 8, 20.0),
    Case("30B-A3B, four hosts", "qwen3-30b-a3b", 4, 2, 12.0),
)


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--count", type=Path, help="count bytes and measure threads anew, into this file")
    parser.add_argument("--table", action="store_true", help="print the table of docs/weights.md alone")
    parser.add_argument("--check", action="store_true", help="fail where a goal is missed")
    options = parser.parse_args()
    if options.count:
        say(machine())
        options.count.write_text(json.dumps(counted(), indent=1) + "\n", encoding="utf-8")
    data = json.loads((options.count or DATA).read_text(encoding="utf-8"))
    if options.table:
        print(table(data), end="")
        return
    say(assumptions(data))
    say(table(data))
    totals = {case.name: total(legs(case, data)) for case in CASES}
    emit("weights_at_size", {name: round(seconds, 2) for name, seconds in totals.items()})
    missed = [case.name for case in CASES if totals[case.name] > case.goal]
    say(f"missed: {', '.join(missed)}" if missed else "all goals are met")
    if options.check and missed:
        sys.exit(1)


def legs(case: Case, data: Mapping[str, Any]) -> dict[str, dict[str, float]]:
    """Stage → leg → seconds; the legs of a stage overlap, the stages follow each other."""
    own, rates, a = data["cases"][case.name], data["threads"], RATES
    size, tensors = own["bytes"], own["tensors"]
    across = own["shard_ranks"] > GPUS_PER_HOST
    up, exchanged = own["uploaded"], own["exchanged"]
    engines = GPUS_PER_HOST // case.tensor_parallel
    found = {
        "cast": {
            "gather and down to the host": own["gathered"] / (a["network" if across else "nvlink"] * 1e9)
            + own["down"] / (a["pcie"] * 1e9),
            "cast, NaN, digest": _host(size, rates["cast"], THREADS, "cast"),
        }
    }
    if case.hosts == 1:
        found["verify"] = {"digest": _host(size, rates["verify"], THREADS, "verify")}
    else:
        found["broadcast"] = {
            "network": size / (a["network"] * 1e9),
            "up and down": size / (a["pcie"] * 1e9),
            "copy into pinned memory": _host(size, rates["stage"], THREADS, "stage"),
            "copy and digest as it arrives": _host(size, rates["arrive"], THREADS, "arrive"),
        }
    each = max(
        1, THREADS * 2 // GPUS_PER_HOST
    )  # threads that eight workers of a host with 32 cores find free
    found["load"] = {
        "copy into pinned memory": max(
            up / (each * rates["stage"] * 1e9),
            up * GPUS_PER_HOST * TOUCHES["stage"] / (a["memory"] * 1e9),
        ),
        "up": up / (a["pcie"] * 1e9),
        "exchange": exchanged / (a["nvlink"] * 1e9),
        "into the layers": 2 * size / (a["gpu"] * 1e9),
        "loader": tensors * TENSOR_S,
    }
    found["calls"] = {"calls": CALLS_S}
    assert engines * case.tensor_parallel == GPUS_PER_HOST
    return found


def _host(size: float, rate: float, threads: int, what: str) -> float:
    """Seconds of threads, which the host's memory bounds together."""
    return max(size / (threads * rate * 1e9), size * TOUCHES[what] / (RATES["memory"] * 1e9))


def total(found: Mapping[str, Mapping[str, float]]) -> float:
    """Seconds from the optimizer's end to engines that serve."""
    return sum(max(stage.values()) for stage in found.values())


def bounds(found: Mapping[str, Mapping[str, float]]) -> str:
    """The longest leg of the longest stage."""
    stage = max(found, key=lambda name: max(found[name].values()))
    return max(found[stage], key=lambda leg: found[stage][leg])


def table(data: Mapping[str, Any]) -> str:
    """As docs/weights.md has it."""
    lines = [
        "| | bytes | cast | verify, or broadcast | load | in all | goal | what bounds it | with one thread a leg |",
        "| --- | --- | --- | --- | --- | --- | --- | --- | --- |",
    ]
    for case in CASES:
        found, own = legs(case, data), data["cases"][case.name]
        stages = {name: max(stage.values()) for name, stage in found.items()}
        middle = stages.get("verify", stages.get("broadcast", 0.0))
        with patch.dict(globals(), THREADS=1):
            alone = total(legs(case, data))
        lines.append(
            f"| {case.name}, TP {case.tensor_parallel} | {own['bytes'] / 1e9:.1f} GB | {stages['cast']:.2f} s "
            f"| {middle:.2f} s | {stages['load']:.2f} s | **{total(found):.1f} s** | {case.goal:g} s "
            f"| {bounds(found)} | {alone:.1f} s |"
        )
    return "\n".join(lines) + "\n"


def assumptions(data: Mapping[str, Any]) -> str:
    """What the times rest on."""
    threads = ", ".join(f"{name} {rate:.1f}" for name, rate in data["threads"].items())
    links = ", ".join(f"{name} {rate:g}" for name, rate in RATES.items())
    return (
        f"assumed, GB/s: {links}; {THREADS} threads, a host's memory touched {TOUCHES} times a byte; "
        f"{TENSOR_S * 1e6:g} us a tensor in the loader, {CALLS_S} s of calls\n"
        f"measured, GB/s a thread ({data['machine']}): {threads}"
    )


def counted() -> dict[str, Any]:
    """Bytes of each case, and what a thread does in a second here."""
    found = {}
    for case in CASES:
        started = time.monotonic()
        found[case.name] = trainers_bytes(case) | workers_bytes(case)
        say(f"{case.name}: {found[case.name]} ({time.monotonic() - started:.0f} s)")
    return {"machine": machine(), "threads": thread_rates(), "cases": found}


def trainers_bytes(case: Case) -> dict[str, float]:
    """Of a publication, by the trainer's own code on one imaginary GPU of so many."""
    from headrace_fake_world.device import NAME
    from headrace_fake_world.step import Case as World
    from headrace_fake_world.step import published

    layout, phase = published(World(case.model, case.ranks))
    return {
        "gathered": sum(phase.moved.values()),
        "down": phase.carried[f"{NAME} to cpu"],
        "shard_ranks": layout.shard_ranks,
    }


def layout_of(model: str) -> list[tuple[str, str, tuple[int, ...]]]:
    """Names, types and shapes of a published version."""
    import tempfile

    import torch
    from headrace_fake_world.models import write_model
    from headrace_modelkit.loading import load_model
    from headrace_modelkit.weights import weight_layout
    from headrace_schema.sections.generating import ModelSection

    with tempfile.TemporaryDirectory() as directory:
        path = write_model(Path(directory), model)
        empty = load_model(ModelSection(path=str(path), dtype="bfloat16"), weights=False, device="meta")
        found = weight_layout(empty, torch.bfloat16)
    return [(name, str(kind).removeprefix("torch."), shape) for name, kind, shape in found]


def workers_bytes(case: Case) -> dict[str, float]:
    """Of an engine's worker, by its own code: what it uploads, and what comes to it from its neighbours."""
    import math

    import torch
    from headrace_modelkit.pinned import Rooms
    from headrace_rollout.engines.hosted import files

    rows, offset = [], 0
    for name, kind, shape in layout_of(case.model):
        size = math.prod(shape) * getattr(torch, kind).itemsize
        rows.append([name, kind, list(shape), offset, size, ""])
        offset += size
    uploaded, exchanged = [0], [0]

    def upload(_: Rooms, source: torch.Tensor, target: torch.Tensor) -> None:
        uploaded[0] += len(source)

    def exchange(own: torch.Tensor, dim: int) -> torch.Tensor:
        exchanged[0] += (case.tensor_parallel - 1) * len(own)
        return own.repeat(case.tensor_parallel)

    ranks: Any = SimpleNamespace(
        world_size=case.tensor_parallel, rank_in_group=0, cpu_group=None, all_gather=exchange
    )
    empty = torch.empty(offset, dtype=torch.uint8, device="meta")
    with patch.object(files, "flat_bytes", lambda body: empty), patch.object(Rooms, "upload", upload):
        for _ in files.uploaded(memoryview(b""), rows, torch.device("meta"), ranks):
            pass
    return {"bytes": offset, "tensors": len(rows), "uploaded": uploaded[0], "exchanged": exchanged[0]}


if __name__ == "__main__":
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    main()

"""The law of decoding against published batch curves: `python benchmarks/decoding.py`.

With n sequences in flight a token takes `fixed + each * n ** power` seconds. For each curve in `decode_curves.json`
the straight line (power 1) and the best power are fitted by least squares of the relative errors, costs at least 0.
Prints one JSON line: `decode_error_line`, `decode_error_power`: mean over curves of the worst relative error;
`power_dense_low` … `power_experts_high`: the powers found. `--elastic` shows what the powers mean for the simulated
gain of devices that move in a 7B run on 64 devices, whose costs are fitted to published runs under each.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import fmean
from typing import Any

from _harness import emit, say, table
from _transfers import MEASUREMENTS, load
from headrace_planner import Lengths, Point, Profile, Workload, fit
from headrace_planner.cluster import simulate, simulate_elastic
from headrace_planner.profiling.fitting import two_costs

CURVES = Path(__file__).parent / "data" / "decode_curves.json"
POWERS = tuple(step / 20 for step in range(8, 41))
SHOWN = (0.6, 0.8, 1.0, 1.3)
"""Powers that published runs are fitted with: those of mixtures of experts, a straight line, and of a dense model."""


@dataclass(frozen=True)
class Law:
    """Milliseconds of a token, and the worst relative error over the points that it was fitted to."""

    fixed: float
    each: float
    power: float
    error: float


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--curves", type=Path, default=CURVES, help="published curves, JSON")
    parser.add_argument("--elastic", action="store_true", help="simulate devices that move under each power")
    options = parser.parse_args()
    rows, lines, powers = [], [], []
    found: dict[str, list[float]] = {"dense": [], "experts": []}
    for curve in json.loads(options.curves.read_text(encoding="utf-8"))["curves"]:
        line, best = fitted(curve["points"], (1.0,)), fitted(curve["points"], POWERS)
        lines.append(line.error)
        powers.append(best.error)
        found["experts" if "experts" in curve["kind"] else "dense"].append(best.power)
        rows.append(
            (curve["name"], curve["kind"], f"{line.fixed:.1f} + {line.each:.3f} n", f"{line.error:.0%}",
             f"{best.fixed:.1f} + {best.each:.3f} n^{best.power:.2f}", f"{best.error:.0%}")
        )  # fmt: skip
    table(("curve", "kind", "line, ms", "worst", "power, ms", "worst"), rows)
    figures = {"decode_error_line": fmean(lines), "decode_error_power": fmean(powers)}
    for kind, own in found.items():
        figures |= {f"power_{kind}_low": min(own), f"power_{kind}_high": max(own)}
    if options.elastic:
        figures |= dict(elastic_under())
    emit("decoding", figures)


def fitted(points: Sequence[Sequence[float]], powers: Sequence[float]) -> Law:
    """The best of the laws with these powers."""
    laws = []
    for power in powers:
        fixed, each = two_costs([(1 / ms, n**power / ms) for n, ms in points], [1.0] * len(points))
        off = [(fixed + each * n**power) / ms - 1 for n, ms in points]
        laws.append((sum(error * error for error in off), Law(fixed, each, power, max(map(abs, off)))))
    return min(laws, key=lambda law: law[0])[1]


def elastic_under() -> Iterator[tuple[str, float]]:
    """Gain of devices that move over the fastest static mode, for each of the powers."""
    import elastic

    data: dict[str, Any] = dict(load(MEASUREMENTS))
    costs, rows = elastic.move_costs(data), []
    for power in SHOWN:
        with_power = under(elastic, data, power)
        static = min(simulate(with_power, tree, 1, 1).step_s for _, tree in elastic.modes(with_power))
        both = elastic.resident(with_power)
        moved = min(
            simulate_elastic(both, tree, costs, 1, 1, 8).step_s for _, tree in elastic.elastic_trees(64)
        )
        generate = with_power.profiles["generate"]
        rows.append(
            (power, f"{generate.error:.1%}", f"{static:.0f}", f"{moved:.0f}", f"{static / moved:.2f}")
        )
        say(f"power {power}: {static / moved:.3f}")
        yield f"elastic_speedup_64_power_{power}", static / moved
    table(("power", "error of the fit", "static, s", "elastic, s", "gain"), rows)


def under(elastic: Any, data: dict[str, Any], power: float) -> Workload:
    """`elastic.py`'s published batch on 64 devices, its generation fitted with a power."""
    work: Workload = elastic.workload(data, 64, elastic.PUBLISHED)
    known: Profile = work.profiles["generate"]
    lengths = known.lengths
    assert isinstance(lengths, Lengths)
    published = data["grpo_7B_latency_s"]["RLinf_temporal"]
    points = [Point(elastic.PUBLISHED, int(size), published[size]["rollout"]) for size in elastic.FITTED]
    made = fit(replace(known, batch_power=power), points)
    return replace(work, profiles={**work.profiles, "generate": made})


if __name__ == "__main__":
    main()

"""What the tiny model learns from answers of older versions: `python benchmarks/staleness.py --seeds 0 1 2`.

Runs `examples/tiny.yaml` by `headrace debug`, all services in one process, with max_staleness 0, 1 and 4, and with 4
without correction; the same number of samples each. `heldout_gap_kK`: how much less than with 0 is right on held-out
prompts at the end, in the mean over seeds. `--record FILE` adds each run to a JSON file as it ends and skips those that
the file has; `--draw FILE` writes the curves of all recorded runs as an SVG. `--spec FILE` takes another run.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

from _curves import draw
from _harness import emit, machine, say, table

EXAMPLE = Path(__file__).parents[1] / "examples" / "tiny.yaml"
CASES: dict[str, tuple[str, ...]] = {
    "k = 0": (),
    "k = 1": ("algorithm.max_staleness=1",),
    "k = 4": ("algorithm.max_staleness=4",),
    "k = 4, not corrected": ("algorithm.max_staleness=4", "algorithm.options.correction=none"),
}
SIDES = ("placement.mode=disaggregated", "checkpoint.enabled=false")
FIGURES = (
    "staleness_mean",
    "log_prob_mismatch_kl",
    "correction_capped_fraction",
    "correction_weight",
    "log_prob_ratio_ess",
)
LIMIT_S = 1800
Found = dict[str, Any]


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--spec", type=Path, default=EXAMPLE)
    parser.add_argument("--model", type=Path, help="model's directory; default: the tiny one, made anew")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE", help="changes the spec")
    parser.add_argument("--record", type=Path, help="JSON file of all runs that were measured")
    parser.add_argument("--draw", type=Path, help="SVG of the recorded runs")
    options = parser.parse_args()
    say(machine())
    known = options.record is not None and options.record.exists()
    runs: dict[str, dict[str, Found]] = json.loads(options.record.read_text()) if known else {}
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        model = options.model or _tiny(Path(folder))
        for seed in options.seeds:
            for case, changes in CASES.items():
                if str(seed) in runs.get(case, {}):
                    continue
                given = (
                    *changes,
                    *SIDES,
                    f"seed={seed}",
                    f"steps={options.steps}",
                    f"model.path={model}",
                    *options.set,
                )
                found = run(options.spec, given)
                say(
                    f"{case}, seed {seed}: { ({key: value for key, value in found.items() if key != 'rewards'}) }"
                )
                runs.setdefault(case, {})[str(seed)] = found
                if options.record:
                    options.record.write_text(json.dumps(runs) + "\n", encoding="utf-8")
    if options.draw:
        curves = {
            case: {int(seed): each["rewards"] for seed, each in own.items()} for case, own in runs.items()
        }
        options.draw.write_text(draw(curves), encoding="utf-8")
    emit("staleness", figures(runs))


def _tiny(folder: Path) -> Path:
    from headrace_modelkit.presets.tiny import write_tiny

    write_tiny(folder / "tiny")
    return folder / "tiny"


def run(spec: Path, changes: tuple[str, ...]) -> Found:
    """One run; raises subprocess.CalledProcessError when it failed."""
    command = [sys.executable, "-m", "headrace_cli", "debug", str(spec), "--json"]
    command += [part for change in changes for part in ("--set", change)]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    events = [json.loads(line) for line in done.stdout.splitlines() if line.startswith("{")]
    views = [event["view"] for event in events if event["type"] == "step_committed"]
    scores = [event["view"]["score"] for event in events if event["type"] == "evaluated"]
    told = [view["figures"] for view in views]
    own = {name: [each[name] for each in told if each.get(name) is not None] for name in FIGURES}
    return {
        "heldout_before": scores[0],
        "heldout_after": scores[-1],
        **{name: statistics.fmean(values) for name, values in own.items() if values},
        "worst_staleness": max(view["max_staleness"] for view in views),
        "rewards": [each["reward_mean"] for each in told],
    }


def figures(runs: dict[str, dict[str, Found]]) -> dict[str, float]:
    """Means over seeds, and what each case loses against the first."""
    after = {case: [each["heldout_after"] for each in own.values()] for case, own in runs.items()}
    names = ("heldout_before", "heldout_after", "worst_staleness", *FIGURES)
    table(
        ("case", "seeds", *names),
        [
            (case, len(own), *(_mean(own, name) for name in names))
            for case, own in runs.items()
        ],
    )  # fmt: skip
    strict = statistics.fmean(after["k = 0"])
    found = {"heldout_k0": strict}
    for case, scores in after.items():
        if case != "k = 0":
            name = case.replace("k = ", "k").replace(", not corrected", "_uncorrected")
            found[f"heldout_{name}"] = statistics.fmean(scores)
            found[f"heldout_gap_{name}"] = strict - statistics.fmean(scores)
    return found


def _mean(own: dict[str, Found], name: str) -> str:
    values = [each[name] for each in own.values() if name in each]
    return f"{statistics.fmean(values):.4g}" if values else ""


if __name__ == "__main__":
    main()

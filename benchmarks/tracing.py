"""What traces cost a step: `python benchmarks/tracing.py`.

Trains the tiny model on two fleets in turns, one of which sends its traces to a collector on this machine. Prints one
JSON line: `step_with_tracing_vs_without` (median seconds of a step with traces over those without) and
`spans_per_step`. The collector decodes every span, as a real one does, on the same cores.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from pathlib import Path
from statistics import median

from _harness import emit, machine, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.services.collector import Collector  # noqa: E402
from harness.specs import small_spec  # noqa: E402

GOAL = 1.02
SETTLED = 5
"""The first steps of a run are left out."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs with and without traces")
    options = parser.parse_args()
    say(machine())
    with tempfile.TemporaryDirectory() as folder, Collector() as collector:
        model = Path(folder) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        found: dict[bool, list[float]] = {False: [], True: []}
        for turn in range(options.turns):
            for traced in (False, True) if turn % 2 else (True, False):
                variables = {"HEADRACE_OTLP_ENDPOINT": collector.endpoint} if traced else {}
                with Fleet(Path(folder) / f"{turn}-{traced}", "--simulator", "0", **variables) as fleet:
                    found[traced] += _steps(fleet, model, options.steps)
            say(
                f"turn {turn + 1}: {median(found[False]):.4f} s a step without, {median(found[True]):.4f} s with traces"
            )
        spans = len(collector.spans) / (options.turns * options.steps)
    ratio = median(found[True]) / median(found[False])
    say("the goal is met" if ratio <= GOAL else f"missed: {ratio:.3f} is above {GOAL}")
    say(f"at the end: {machine()}")
    emit("tracing", {"step_with_tracing_vs_without": ratio, "spans_per_step": spans})


def _steps(fleet: Fleet, model: Path, steps: int) -> list[float]:
    """Seconds of the settled steps of one run."""
    spec = small_spec(
        model,
        steps=steps,
        algorithm={"prompts_per_step": 16, "group_size": 8},
        sampling={"max_new_tokens": 16},
        rollout={"max_concurrency": 128},
        data__heldout=0,
        checkpoint={"enabled": False},
    )
    run = fleet.succeed(fleet.submit(spec), timeout_s=600)
    return [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]


if __name__ == "__main__":
    main()

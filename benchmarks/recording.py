"""What recording costs a step: `python benchmarks/recording.py`.

Trains the tiny model on one fleet, in turns without a recording, with what a failed step would need, and with a file of
every step. Prints one JSON line: `step_with_recording_vs_without` (median seconds of a step with `recording.keep:
failed` over those without), `step_with_files_vs_without` (`all`), and `bytes_per_step` of a recording.
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
from harness.specs import small_spec  # noqa: E402

KEEPS = ("none", "failed", "all")
SETTLED = 5
"""The first steps of a run are left out."""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=40, help="of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    options = parser.parse_args()
    say(machine())
    found: dict[str, list[float]] = {keep: [] for keep in KEEPS}
    sizes: list[int] = []
    with tempfile.TemporaryDirectory() as folder:
        model = Path(folder) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        with Fleet(Path(folder) / "fleet", "--simulator", "0") as fleet:
            for turn in range(options.turns):
                for keep in KEEPS[turn % 3 :] + KEEPS[: turn % 3]:
                    found[keep] += _steps(fleet, model, options.steps, keep, sizes)
                say(", ".join(f"{keep} {median(seconds):.4f} s" for keep, seconds in found.items()))
    without = median(found["none"])
    say(f"at the end: {machine()}")
    emit(
        "recording",
        {
            "step_with_recording_vs_without": median(found["failed"]) / without,
            "step_with_files_vs_without": median(found["all"]) / without,
            "bytes_per_step": median(sizes),
        },
    )


def _steps(fleet: Fleet, model: Path, steps: int, keep: str, sizes: list[int]) -> list[float]:
    """Seconds of the settled steps of one run; `sizes` gets the bytes of its recordings."""
    spec = small_spec(
        model,
        steps=steps,
        algorithm={"prompts_per_step": 16, "group_size": 8},
        sampling={"max_new_tokens": 16},
        rollout={"max_concurrency": 128},
        recording={"keep": keep},
        data__heldout=0,
        checkpoint={"interval_steps": 1},
    )
    run = fleet.succeed(fleet.submit(spec), timeout_s=600)
    sizes += [each.size_bytes for each in fleet.client.recordings(run.id).recordings]
    return [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]


if __name__ == "__main__":
    main()

"""What uploads of checkpoints cost a step: `python benchmarks/stores.py`.

Trains the tiny model on one fleet by turns without a store and with one, a checkpoint every few steps, against an S3
server on the same cores. Turns are short, and each is compared with itself alone, so that whoever else uses the machine
slows both sides alike. Prints one JSON line: `step_with_uploads_vs_without` (a turn's median seconds of a step; the
median of the turns' ratios), `cpu_with_uploads_vs_without` (the same of the fleet's CPU seconds, a whole run's),
`uploaded_share` (checkpoints that came into the store, of those that were written) and `upload_s` (median).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
import time
from pathlib import Path
from statistics import median

from _harness import CpuUse, emit, machine, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.object_store import environment_of, make_bucket, s3_server  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

SETTLED = 5
"""The first steps of a run are left out."""
LOOK_S = 2.0
BUCKET = "checkpoints"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=35, help="of each run")
    parser.add_argument("--turns", type=int, default=8, help="runs of each kind")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    say(machine())
    steps: dict[bool, list[float]] = {False: [], True: []}
    cpu: dict[bool, list[float]] = {False: [], True: []}
    uploads: list[float] = []
    written = 0
    with tempfile.TemporaryDirectory() as folder, s3_server() as address:
        make_bucket(address, BUCKET)
        os.environ.update(environment_of(address))
        model = Path(folder) / "tiny"
        run_python("-m", "headrace_modelkit.presets.tiny", model)
        with Fleet(Path(folder) / "fleet", "--simulator", "0") as fleet:
            for turn in range(options.turns):
                for stored in (False, True) if turn % 2 else (True, False):
                    step_s, cpu_s, events = _run(fleet, model, options.steps, options.every, stored)
                    steps[stored].append(step_s)
                    cpu[stored].append(cpu_s)
                    uploads += [event["seconds"] for kind, event in events if kind == "checkpoint_uploaded"]
                    written += stored * sum(kind == "checkpoint_saved" for kind, _ in events)
                say(f"turn {turn + 1}: with {steps[True][-1]:.4f} s a step, without {steps[False][-1]:.4f} s")
    say(f"at the end: {machine()}")
    emit(
        "stores",
        {
            "step_with_uploads_vs_without": _ratio(steps),
            "cpu_with_uploads_vs_without": _ratio(cpu),
            "uploaded_share": len(uploads) / written,
            "upload_s": median(uploads),
        },
    )


def _ratio(found: dict[bool, list[float]]) -> float:
    return median(one / other for one, other in zip(found[True], found[False], strict=True))


def _run(
    fleet: Fleet, model: Path, steps: int, every: int, stored: bool
) -> tuple[float, float, list[tuple[str, dict[str, float]]]]:
    """Median seconds of the settled steps of one run, the fleet's CPU seconds, and its events."""
    spec = small_spec(
        model,
        steps=steps,
        algorithm={"prompts_per_step": 16, "group_size": 8},
        sampling={"max_new_tokens": 16},
        rollout={"max_concurrency": 128},
        data__heldout=0,
        checkpoint={"interval_steps": every},
    )
    if stored:
        spec["store"] = {"url": f"s3://{BUCKET}/runs"}
    use = CpuUse(fleet.look)
    run = fleet.submit(spec)
    while not fleet.client.get(run.id).ended:
        time.sleep(LOOK_S)
        use.look()  # who uploads ends with the run
    run = fleet.succeed(run)
    seconds = [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]
    return median(seconds), use.seconds(), [(event.type, event.data) for event in fleet.events(run)]


if __name__ == "__main__":
    main()

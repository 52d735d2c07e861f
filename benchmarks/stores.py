"""What uploads of checkpoints cost a step: `python benchmarks/stores.py`.

Trains the tiny model on one fleet by turns without a store and with one, a checkpoint every few steps, against an S3
server on the same cores. Prints one JSON line: `step_with_uploads_vs_without` (median seconds of a step),
`uploaded_share` (checkpoints that came into the store, of those that were written) and `upload_s` (median).
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from _harness import emit, machine, say

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "integration_tests"))

from harness.fleet import Fleet  # noqa: E402
from harness.object_store import environment_of, make_bucket, s3_server  # noqa: E402
from harness.processes import run_python  # noqa: E402
from harness.specs import small_spec  # noqa: E402

SETTLED = 5
"""The first steps of a run are left out."""
BUCKET = "checkpoints"


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=60, help="of each run")
    parser.add_argument("--turns", type=int, default=3, help="runs of each kind")
    parser.add_argument("--every", type=int, default=10, help="steps between checkpoints")
    options = parser.parse_args()
    say(machine())
    steps: dict[bool, list[float]] = {False: [], True: []}
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
                    found, events = _run(fleet, model, options.steps, options.every, stored)
                    steps[stored] += found
                    uploads += [event["seconds"] for kind, event in events if kind == "checkpoint_uploaded"]
                    written += stored * sum(kind == "checkpoint_saved" for kind, _ in events)
                say(", ".join(f"{kind} {median(seconds):.4f} s" for kind, seconds in steps.items()))
    say(f"at the end: {machine()}")
    emit(
        "stores",
        {
            "step_with_uploads_vs_without": median(steps[True]) / median(steps[False]),
            "uploaded_share": len(uploads) / written,
            "upload_s": median(uploads),
        },
    )


def _run(
    fleet: Fleet, model: Path, steps: int, every: int, stored: bool
) -> tuple[list[float], list[tuple[str, dict[str, float]]]]:
    """Seconds of the settled steps of one run, and its events."""
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
    run = fleet.succeed(fleet.submit(spec), timeout_s=600)
    seconds = [float(step.wall_s) for step in fleet.client.metrics(run.id)][SETTLED:]
    return seconds, [(event.type, event.data) for event in fleet.events(run)]


if __name__ == "__main__":
    main()

"""Memory and time of a loss and its gradient from hidden states and head: `python benchmarks/losses.py`.

The trainer's head (`headrace_modelkit.hidden`) against verl's `FusedLinearForPPO` and the chunked head of TRL's
GRPOTrainer, on the same tensors: 4 × 2,048 tokens, 49,152 words, 576 hidden units, fp32 on the CPU. Each takes its
turn in a process of its own (`peers/fused_loss.py`; the peers' with the Python of their own environment): resident
peak during the call minus what was resident before it, and seconds. Log-probs and entropies are computed by all;
gradients go to hidden states and head. A path that computed something else than the others ends the script.

`verl` and `trl` are what their trainers call, with their own sizes of chunks. `verl_128` and `trl_2048` are the same
functions with small ones: what part of a difference is only the size.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from _environments import PEERS, environment
from _harness import emit, machine, say, table

SCRIPT = Path(__file__).parent / "peers" / "fused_loss.py"
OURS = "headrace"
PATHS = (OURS, "verl", "trl", "verl_128", "trl_2048")
TURN_S = 900.0
RELATIVE = 1e-4
"""Of what two paths compute: sums in another order differ by about 1e-6."""
FINGERPRINT = ("entropy", "of_hidden", "norm_hidden", "of_weight", "norm_weight")
Turn = Mapping[str, float]


def main() -> None:
    """Command line."""
    options = parse()
    peers = environment("trl", PEERS)
    task = {
        name: getattr(options, name) for name in ("sequences", "tokens", "vocabulary", "hidden", "threads")
    }
    found: dict[str, list[Turn]] = {path: [] for path in options.paths}
    for turn in range(options.turns):
        say(f"turn {turn + 1}: {machine()}")
        for path in options.paths if turn % 2 == 0 else reversed(options.paths):
            python = Path(sys.executable) if path == OURS else peers
            found[path].append(measured(python, {**task, "path": path, "seed": turn}))
        agree({path: turns[-1] for path, turns in found.items()})
    emit("losses", figures(found))


def parse() -> argparse.Namespace:
    """The options."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--turns", type=int, default=3)
    parser.add_argument("--threads", type=int, default=os.cpu_count())
    parser.add_argument("--paths", nargs="+", choices=PATHS, default=PATHS)
    for name, default in (("sequences", 4), ("tokens", 2048), ("vocabulary", 49152), ("hidden", 576)):
        parser.add_argument(f"--{name}", type=int, default=default)
    return parser.parse_args()


def measured(python: Path, task: Mapping[str, Any]) -> Turn:
    """One path's turn; RuntimeError with its words when it fails."""
    done = subprocess.run(
        [str(python), str(SCRIPT), json.dumps(task)],
        env={**os.environ, "OMP_NUM_THREADS": str(task["threads"]), "HF_HUB_OFFLINE": "1"},
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        timeout=TURN_S,
        check=False,
    )
    if done.returncode:
        raise RuntimeError(f"{task['path']} ended with {done.returncode}:\n{done.stderr[-2000:]}")
    found: dict[str, float] = json.loads(done.stdout.splitlines()[-1])
    say(f"  {task['path']}: {found['wall_s']:.1f} s, {found['peak_bytes'] / 1e6:.0f} MB")
    return found


def agree(turns: Mapping[str, Turn]) -> None:
    """Raises RuntimeError when two paths did not compute the same entropies and gradients."""
    first, *others = turns
    for other in others:
        for name in FINGERPRINT:
            mine, theirs = turns[first][name], turns[other][name]
            if not math.isclose(mine, theirs, rel_tol=RELATIVE, abs_tol=RELATIVE):
                raise RuntimeError(f"{first} and {other} differ in {name}: {mine} and {theirs}")


def figures(found: Mapping[str, Sequence[Turn]]) -> dict[str, float | None]:
    """Each path's medians, and ours over each peer's. Memory is the largest peak of the turns."""
    seconds = {path: median(turn["wall_s"] for turn in turns) for path, turns in found.items()}
    cpu = {path: median(turn["cpu_s"] for turn in turns) for path, turns in found.items()}
    peaks = {path: max(turn["peak_bytes"] for turn in turns) for path, turns in found.items()}
    table(
        ("path", "peak MB", "seconds", "CPU seconds"),
        [(path, peaks[path] / 1e6, seconds[path], cpu[path]) for path in found],
    )
    made: dict[str, float | None] = {}
    for peer in (path for path in found if path != OURS):
        made[f"memory_vs_{peer}"] = peaks[OURS] / peaks[peer]
        made[f"time_vs_{peer}"] = seconds[OURS] / seconds[peer]
        made[f"cpu_vs_{peer}"] = cpu[OURS] / cpu[peer]
    for path in found:
        made |= {f"{path}_peak_mb": peaks[path] / 1e6, f"{path}_s": seconds[path]}
    return made


if __name__ == "__main__":
    main()

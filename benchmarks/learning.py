"""What the demo learns, over seeds: `python benchmarks/learning.py --preset smollm2 --seeds 0 1 2`.

Runs `headrace demo --json` for each seed, one after the other, and prints their last lines' figures side by side.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

KEYS = ("eval_before", "eval_after", "baseline_prefill", "exact_before", "exact_after", "steps", "wall_s")
LIMIT_S = 1800


def demo(preset: str, seed: int, data_dir: Path) -> dict[str, Any]:
    """The last line of one demo; raises subprocess.CalledProcessError when it failed."""
    command = [sys.executable, "-m", "headrace_cli", "demo", "--preset", preset, "--seed", str(seed)]
    command += ["--data-dir", str(data_dir), "--json"]
    done = subprocess.run(command, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S, check=True)
    line: dict[str, Any] = json.loads(done.stdout.strip().splitlines()[-1])
    return line


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--preset", choices=("tiny", "smollm2"), default="smollm2")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--data-dir", type=Path, default=Path(".headrace/learning"))
    arguments = parser.parse_args()
    figures: dict[str, float] = {}
    for seed in arguments.seeds:
        line = demo(arguments.preset, seed, arguments.data_dir)
        shown = {key: line.get(key) for key in KEYS}
        print(f"seed {seed}: {json.dumps(shown)}", file=sys.stderr, flush=True)
        print(
            f"  stages {json.dumps(line['stage_s'])}, protocol {line['protocol_share']:.2%}", file=sys.stderr
        )
        figures |= {f"{key}_seed_{seed}": value for key, value in shown.items() if value is not None}
        figures[f"protocol_share_seed_{seed}"] = line["protocol_share"]
    print(json.dumps({"benchmark": f"learning-{arguments.preset}", "figures": figures}))


if __name__ == "__main__":
    main()

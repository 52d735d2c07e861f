"""Batches of demonstrations decoded as they are drawn, beside all pictures decoded into memory first.

`python benchmarks/demonstrations.py`: writes a data set with one camera, as films or as PNG files (`--files`), and
draws the same batches from it in child processes of their own: with all pictures kept, and with a tenth of them. Two
minutes of a core.

Prints one JSON line: `whole_MiB` and `part_MiB` are by how much the process grew, `pictures_MiB` what all pictures are;
`whole_frames_per_s` and `part_frames_per_s` count frames of drawn batches, once each was drawn about once.
"""

from __future__ import annotations

import argparse
import io
import json
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
import psutil
from _harness import emit, machine, say

BATCH = 64
MIB = 1 << 20


def write(folder: Path, episodes: int, steps: int, side: int, *, films: bool) -> None:
    """A data set whose pictures are a moving gradient with noise that stays."""
    from headrace_robots.cli.lerobot import EpisodeData, write_data_set
    from PIL import Image

    random = np.random.default_rng(0)
    still = random.integers(0, 40, (side, side, 3))
    slope = np.linspace(0, 180, side)[None, :, None]
    shown = []
    for episode in range(episodes):
        pictures = []
        for step in range(steps):
            file = io.BytesIO()
            moved = np.roll(slope, 3 * (step + episode), axis=1) + still
            Image.fromarray(moved.astype(np.uint8)).save(file, format="PNG", compress_level=1)
            pictures.append(file.getvalue())
        numbers = [np.array([step, episode], np.float32) for step in range(steps)]
        shown.append(EpisodeData("move", numbers, numbers, {"front": pictures}))
    write_data_set(folder, shown, {"front": (side, side, 3)}, videos=films)


def draw(folder: Path, cache_mib: int, seconds: float) -> dict[str, float]:
    """Growth in MiB, and frames a second of random batches."""
    import torch
    from headrace_robots.demonstrations import Demonstrations
    from headrace_robots.trainer.backend.cloning import drawn_moments

    data = Demonstrations(folder, ["front"])
    places = [(episode, step) for episode, (_, steps) in enumerate(data.listed()) for step in range(steps)]
    torch.zeros(1)
    before = psutil.Process().memory_info().rss  # not the most of it, which the imports took
    films, number = data.films(cache_mib * MIB), 0

    def batch() -> int:
        nonlocal number
        number += 1
        chosen = drawn_moments(0, number, BATCH, len(places))
        return len(data.take(films, "front", [places[row] for row in chosen]))

    while number * BATCH < len(places):
        batch()
    started, frames = time.perf_counter(), 0
    while time.perf_counter() - started < seconds:
        frames += batch()
    took = time.perf_counter() - started
    return {"MiB": (psutil.Process().memory_info().rss - before) / MIB, "frames_per_s": frames / took}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=20)
    parser.add_argument("--steps", type=int, default=150, help="of an episode")
    parser.add_argument("--side", type=int, default=224, help="pixels")
    parser.add_argument("--seconds", type=float, default=15.0, help="of each measurement")
    parser.add_argument("--files", action="store_true", help="PNG files in parquet in place of films")
    parser.add_argument("--draw", nargs=2, metavar=("DIR", "MIB"), help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.draw:
        print(json.dumps(draw(Path(options.draw[0]), int(options.draw[1]), options.seconds)))
        return
    say(machine())
    whole = options.episodes * options.steps * 3 * options.side**2 / MIB
    figures: dict[str, float | None] = {"pictures_MiB": whole}
    with tempfile.TemporaryDirectory() as root:
        folder = Path(root) / "shown"
        write(folder, options.episodes, options.steps, options.side, films=not options.files)
        for name, kept in (("whole", 2 * whole), ("part", whole / 10)):
            command = [sys.executable, __file__, "--draw", str(folder), str(int(kept))]
            command += ["--seconds", str(options.seconds)]
            done = subprocess.run(command, check=True, capture_output=True, text=True)
            figures |= {f"{name}_{key}": value for key, value in json.loads(done.stdout).items()}
    emit("demonstrations", figures)


if __name__ == "__main__":
    main()

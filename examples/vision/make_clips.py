"""Makes clips: `python examples/vision/make_clips.py DIRECTORY`, videos of colours and sounds of beeps.

DIRECTORY/colours.jsonl has a line for each video, whose answer is the order of its colours ("rgb"), and
DIRECTORY/beeps.jsonl one for each sound, whose answer is how often it beeps.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
from headrace_modelkit.presets.clips import sound_file, video_file

SIDE, FRAMES, RATE = 16, 3, 16_000
COLOURS = {"r": (200, 40, 40), "g": (40, 200, 40), "b": (40, 40, 200)}
MOST_BEEPS, BEEP_S, SLOT_S = 4, 0.08, 0.2


def colours(random: np.random.Generator) -> tuple[bytes, str]:
    """A video in which one frame a second has one colour each, noisy, and their first letters."""
    order = random.choice([*COLOURS], FRAMES)
    frames = [
        np.array(COLOURS[each]) + random.normal(0, 15, (SIDE, SIDE, 3)) + random.normal(0, 20, 3)
        for each in order
    ]
    return video_file([frame.clip(0, 255).astype(np.uint8) for frame in frames], rate=1), "".join(order)


def beeps(random: np.random.Generator) -> tuple[bytes, str]:
    """A sound of less than a second with one to four beeps in it, and their number."""
    count = int(random.integers(1, MOST_BEEPS + 1))
    samples = random.normal(0, 0.01, int(RATE * SLOT_S * MOST_BEEPS))
    times = np.arange(int(RATE * BEEP_S)) / RATE
    for slot in random.choice(MOST_BEEPS, count, replace=False):
        at = int(RATE * (SLOT_S * slot + random.uniform(0.02, SLOT_S - BEEP_S - 0.02)))
        samples[at : at + len(times)] += 0.4 * np.sin(2 * np.pi * random.uniform(400, 1200) * times)
    return sound_file(samples.astype(np.float32), rate=RATE), str(count)


KINDS: dict[str, tuple[Callable[[np.random.Generator], tuple[bytes, str]], str, str, str]] = {
    "colours": (colours, "video", "mp4", "which colours?"),
    "beeps": (beeps, "audio", "wav", "how many?"),
}


def write(directory: Path, kind: str, count: int, seed: int) -> None:
    """The clips of a kind and their lines."""
    make, key, end, question = KINDS[kind]
    random = np.random.default_rng(seed)
    (directory / kind).mkdir(parents=True, exist_ok=True)
    lines = []
    for number in range(count):
        data, answer = make(random)
        path = f"{kind}/{number:05}.{end}"
        (directory / path).write_bytes(data)
        lines.append(json.dumps({key: path, "question": question, "answer": answer}))
    (directory / f"{kind}.jsonl").write_text("\n".join(lines) + "\n")


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--count", type=int, default=1000)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    for kind in KINDS:
        write(options.directory, kind, options.count, options.seed)
        print(options.directory / f"{kind}.jsonl")


if __name__ == "__main__":
    main()

"""Pictures from a simulator to its caller by shared memory, beside the same in the messages of gRPC.

`python benchmarks/pictures.py`: environments that cost nothing show one picture each step; two real services on
loopback, one of which is asked for references, take turns. Every picture becomes an array. About a minute.

Prints one JSON line: for each size, `shm_vs_grpc_SIZE` is the median over rounds of the ratio of steps a second, and
`shm_SIZE_steps_per_s`, `grpc_SIZE_steps_per_s` are the medians that it comes from.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable
from pathlib import Path
from statistics import median

from _harness import emit, machine, say, table
from simulator_overhead import Setting, service

SIZES = (128, 256, 512)
"""Pixels of a side: what policies read, and what cameras give."""
ENVIRONMENT = """
import gymnasium
import numpy as np
from gymnasium import spaces


class Still(gymnasium.Env):
    action_space = spaces.Box(-1.0, 1.0, (4,), np.float32)

    def __init__(self, size):
        self.observation_space = spaces.Box(0, 255, (size, size, 3), np.uint8)
        self.picture = np.random.default_rng(0).integers(0, 256, (size, size, 3), np.uint8)

    def reset(self, *, seed=None, options=None):
        return self.picture, {}

    def step(self, action):
        return self.picture, 0.0, False, False, {}


make_env = Still
"""


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--environments", type=int, default=4, help="each in a process of its own")
    parser.add_argument("--steps", type=int, default=150, help="of each environment in a round")
    parser.add_argument("--rounds", type=int, default=7)
    options = parser.parse_args()
    say(machine())
    figures: dict[str, float | None] = {}
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "still.py"
        file.write_text(ENVIRONMENT)
        for size in SIZES:
            shm, grpc, ratio = compare(
                f"{file}:make_env", size, options.environments, options.steps, options.rounds
            )
            figures[f"shm_vs_grpc_{size}"] = ratio
            figures |= {f"shm_{size}_steps_per_s": shm, f"grpc_{size}_steps_per_s": grpc}
            table(["pixels", "shm", "gRPC", "ratio"], [[f"{size} x {size}", shm, grpc, ratio]])
    say(f"at the end: {machine()}")
    emit("pictures", figures)


def compare(name: str, size: int, environments: int, steps: int, rounds: int) -> tuple[float, float, float]:
    """Median steps a second by shared memory and by gRPC, and the median of their ratios."""

    def setting(blob_bytes: int) -> Setting:
        return Setting("gymnasium", name, steps, {"size": size}, blob_bytes)

    def rate(run: Callable[[int], float]) -> float:
        return environments * steps / run(steps)

    with service(setting(1), environments) as shm, service(setting(0), environments) as grpc:
        rate(shm), rate(grpc)  # warm
        pairs = [(rate(shm), rate(grpc)) for _ in range(rounds)]
    return (
        median(one for one, _ in pairs),
        median(other for _, other in pairs),
        median(one / other for one, other in pairs),
    )


if __name__ == "__main__":
    main()

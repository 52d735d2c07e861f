"""What the checks of gpu_check have in common: where they run, what they find, and what is wrong with any run.

Runs go through a fleet and the client, like a user's.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
MISMATCH_KL = 0.02
"""Above it the engine computes another model: bf16's rounding alone stays below 0.003 in every run so far."""


@dataclass(frozen=True)
class Finding:
    """Figures, and what is wrong with them; `skipped`: why nothing was measured."""

    figures: Mapping[str, Any] = field(default_factory=dict)
    problems: tuple[str, ...] = ()
    skipped: str = ""


@dataclass(frozen=True)
class Bench:
    """Where a check runs: on `gpus` GPUs, or with 0 of them on the CPU at small sizes."""

    gpus: int
    folder: Path

    @property
    def cpu(self) -> bool:
        """Whether this is a rehearsal, in which memory figures mean nothing."""
        return not self.gpus

    def devices(self, most: int) -> list[str]:
        """torch's names of at most so many devices."""
        return ["cpu"] if self.cpu else [f"cuda:{index}" for index in range(min(most, self.gpus))]

    def model(self, shape: str) -> Path:
        """A model of a shape, made once for all checks of this bench."""
        from _run_at_size import write_model

        directory = self.folder / shape
        if not (directory / "config.json").is_file():
            write_model(shape, directory, device="cpu" if self.cpu else "cuda:0")
        return directory

    def run(self, shape: str, during: Any = None, **size: Any) -> dict[str, float]:
        """A run's figures."""
        from _run_at_size import Size, run

        gpus = 0 if self.cpu else size.pop("gpus", 1)
        size.pop("gpus", None)
        return run(Size(shape, gpus=gpus, **size), self.model(shape), during)


def missing(module: str) -> str:
    """Why a module's checks cannot run; empty where it is installed, here or in .envs for these devices.

    `make engines` says in `.complete` for which devices it made an environment; other environments say nothing.
    """
    import torch

    environment = ROOT / ".envs" / module
    if find_spec(module) is not None:
        return ""
    if not (environment / "bin" / "python").is_file():
        return (
            f"{module} is not installed, and there is no .envs/{module} (make engines ENGINE=vllm or sglang)"
        )
    stamp = environment / ".complete"
    made = stamp.read_text().strip() if stamp.is_file() else ""
    if made and (made == "cpu") is torch.cuda.is_available():
        return f".envs/{module} was made for {made}: make engines ENGINE={module}"
    return ""


def wrong_with(found: Mapping[str, float]) -> list[str]:
    """What is wrong with any run."""
    wrong = []
    if not found["steps_with_gradient"]:
        wrong.append("no step had a gradient")
    if found["worst_mismatch_kl"] > MISMATCH_KL:
        wrong.append(f"the engine's log-probs are {found['worst_mismatch_kl']:.3g} nats off the trainer's")
    return wrong


def until(holds: Callable[[], bool], what: str, seconds: float = 120.0) -> None:
    """Waits; RuntimeError where `what` does not come."""
    deadline = time.monotonic() + seconds
    while not holds():
        if time.monotonic() > deadline:
            raise RuntimeError(f"{what} did not come within {seconds:.0f} s")
        time.sleep(0.2)

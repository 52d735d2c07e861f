"""Throw-away Python environments for the systems that benchmarks compare with, made below `.headrace/peers`."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

from _harness import say

ROOT = Path(__file__).parents[1] / ".headrace" / "peers"
INSTALL_S = 1800.0
PEERS = (
    ["torch==2.13.0"],  # first, so that the others do not bring CUDA's
    ["trl==1.16.0", "transformers==5.23.0", "accelerate==1.15.0", "datasets==5.2.0", "pydantic==2.14.3"],
    ["--no-deps", "verl==0.9.1"],  # one file of it is used, which needs torch alone
)
"""TRL, and verl's kernels: the environment `trl`."""


def environment(name: str, steps: Sequence[Sequence[str]]) -> Path:
    """The Python of an environment in which `pip install` ran with each of `steps`' arguments, in order.

    Kept for the next time; made anew when the steps have changed or were interrupted.
    """
    folder = ROOT / name
    python, stamp = folder / "bin" / "python", folder / "complete"
    wanted = "\n".join(" ".join(step) for step in steps)
    if stamp.exists() and stamp.read_text() == wanted:
        return python
    say(f"making {folder}: this takes minutes, once")
    stamp.unlink(missing_ok=True)
    subprocess.run([sys.executable, "-m", "venv", "--clear", folder], check=True, timeout=INSTALL_S)
    for step in steps:
        command: list[str | Path] = [
            python,
            "-m",
            "pip",
            "install",
            "--quiet",
            "--disable-pip-version-check",
            *step,
        ]
        subprocess.run(command, check=True, timeout=INSTALL_S, stdout=sys.stderr)
    stamp.write_text(wanted)
    return python

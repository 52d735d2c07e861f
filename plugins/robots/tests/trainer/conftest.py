"""The fixtures of the trainer's tests, and runs of a small robot policy."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "integration_tests"))
sys.path.insert(0, str(Path(__file__).resolve().parent))

import robot_play
from harness.fixtures import fixtures_of

globals().update(fixtures_of("services/trainer"))


@pytest.fixture(scope="session")
def robots() -> ModuleType:
    """`robot_play.py`: environments, episodes, settled groups of them."""
    return robot_play


@pytest.fixture
def robot_config() -> Callable[..., dict[str, Any]]:
    """Builds the JSON of OpenRun for a new `mlp`, and a short PPO; `options` are the algorithm's."""

    def make(name: str = "ppo", *, group_size: int = 1, options: Any = (), **sections: Any) -> dict[str, Any]:
        policy = {"kind": "mlp", "state_size": 6, "bounds": {"low": [-1.0, -1.0], "high": [1.0, 1.0]}}
        return {
            "model": {"policy": policy | sections.pop("policy", {})},
            "algorithm": {
                "name": name,
                "group_size": group_size,
                "prompts_per_step": 4,
                "options": dict(options),
            },
            "optimizer": {"lr": 1e-3, "beta2": 0.999, "eps": 1e-5, "grad_clip": 0.5},
            "checkpoint": {"keep": 2},
            "seed": 1,
            "steps": 10,
            **sections,
        }

    return make

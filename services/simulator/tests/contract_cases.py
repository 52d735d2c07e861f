"""The environments that the contract suite asks: one or two of each backend."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

EXAMPLES = Path(__file__).resolve().parents[3] / "examples"
UNDER_TEST = os.environ.get("BACKEND_UNDER_TEST", "gymnasium")


@dataclass(frozen=True)
class Case:
    """An environment of a backend; `pixels` are options with which it also shows images."""

    backend: str
    name: str
    misspelt: str
    options: dict[str, Any] = field(default_factory=dict)
    pixels: dict[str, Any] | None = None
    has_success: bool = True
    expert: bool = False
    together: bool = False
    """Its environments are stepped in one call."""
    alone: bool = False
    """There is one of it: the environments of a pool take turns by the episode."""
    listed: bool = True
    """Its backend knows its names, where it is none of a directory."""
    variant: dict[str, Any] = field(default_factory=lambda: {"execution": {"random_start": [2, 4]}})
    simulator: str = ""
    """Of one that comes by way of gymnasium: its name, which is asked for in place of the backend's."""


CASES = [
    Case(
        "gymnasium",
        "Pendulum-v1",
        "Pendulun-v1",
        has_success=False,
        variant={"execution": {"g": [0.5, 0.8], "m": [1.5, 2.0]}},
    ),
    Case(
        "gymnasium",
        "Pendulum-v1",
        "Pendulun-v1",
        has_success=False,
        together=True,
        variant={"execution": {"action_noise": [0.4, 0.5], "action_delay": 1, "observation_noise": 0.1}},
    ),
    Case(
        "gymnasium",
        "CartPole-v1",
        "CartPol-v1",
        {"vectorization_mode": "sync"},
        has_success=False,
        together=True,
        variant={"execution": {"observation_noise": 0.1}},
    ),
    Case(
        "metaworld",
        "reach-v3",
        "reech-v3",
        pixels={"image_size": 64},
        expert=True,
        variant={"execution": {"gravity": [0.1, 0.5], "mass": 3.0, "damping": 0.5, "friction": 0.5}},
    ),
    Case(
        "maniskill",
        "PushCube-v1",
        "PushCub-v1",
        pixels={"obs_mode": "rgb", "sensor_configs": {"width": 64, "height": 64}},
    ),
    Case(
        "maniskill",
        "PutOnPlatePrimitives-v1",
        "PutOnPlatePrimitive-v1",
        pixels={"obs_mode": "rgb", "sensor_configs": {"width": 64, "height": 64}},
    ),
    Case(
        "maniskill",
        "PushCube-v1",
        "PushCub-v1",
        {"sim_backend": "physx_cpu", "render_backend": "cpu"},
        together=True,
        variant={"execution": {"action_noise": [0.4, 0.5]}},
    ),
    Case(
        "libero",
        "libero_spatial/0",
        "libero_spacial/0",
        {"settle_steps": 2},
        {"settle_steps": 0, "cameras": ["agentview"], "image_size": 64, "reflections": False},
    ),
]
CASES.append(
    # A stand-in of a robot; see conftest for its file.
    Case(
        "robot",
        "pendulum",
        "pendulun",
        alone=True,
        variant={"execution": {"observation_noise": 0.1}},
    )
)
# By way of gymnasium, each in an environment of its own.
CASES += [
    Case("gymnasium", name, misspelt, simulator=simulator, has_success=has_success)
    for simulator, name, misspelt, has_success in (
        (
            "dm_control",
            "shimmy:dm_control/cartpole-balance-v0",
            "shimmy:dm_control/cartpole-balence-v0",
            False,
        ),
        ("pybullet", "panda_gym:PandaReach-v3", "panda_gym:PandaReech-v3", True),
        ("robotics", "gymnasium_robotics:FetchReach-v4", "gymnasium_robotics:FetchReech-v4", True),
        (
            "playground",
            f"{EXAMPLES}/embodied/playground.py:make",
            f"{EXAMPLES}/embodied/playgroun.py:make",
            False,
        ),
    )
]
CASES += [
    # Of a directory that conftest writes: in float32, whose noise a variant adds to.
    Case(
        "world",
        "worlds/pendulum",
        "worlds/pendulun",
        has_success=False,
        together=together,
        listed=False,
        variant={"execution": {"observation_noise": 0.1}},
    )
    for together in (False, True)
]
TESTED = [case for case in CASES if (case.simulator or case.backend) == UNDER_TEST]
PIXELS = [case for case in TESTED if case.pixels]
EXPERTS = [case for case in TESTED if case.expert]

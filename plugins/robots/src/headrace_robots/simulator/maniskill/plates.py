"""ManiSkill tasks of our own: put a thing on a plate. One environment in a process, on the CPU.

`PutOnPlateInScene25Main-v3` is the family of that name by which vision-language-action models are compared: 25
things, 16 of them to train on, 36 places for thing and plate, four ways to turn, 80 steps. Its models and its scene
are on no registry. `PutOnPlatePrimitives-v1` is the same with bodies of primitives on ManiSkill's table. The scene's
own pixels are shown: no photograph is laid behind the robot.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import sapien
import torch
from headrace_simulator.backends.base import BackendError
from mani_skill import ASSET_DIR
from mani_skill.envs.sapien_env import BaseEnv
from mani_skill.sensors.camera import CameraConfig
from mani_skill.utils import sapien_utils
from mani_skill.utils.registration import register_env
from mani_skill.utils.scene_builder.table import TableSceneBuilder
from mani_skill.utils.structs.pose import Pose
from mani_skill.utils.structs.types import SimConfig

from headrace_robots.simulator.maniskill.things import TRAINED, Catalogue, Thing, from_assets, primitives

PRIMITIVES, MAIN = "PutOnPlatePrimitives-v1", "PutOnPlateInScene25Main-v3"
TASKS = (PRIMITIVES, MAIN)
STEPS = 80
_GRID, _HALF_EDGE_M, _APART_M = 6, 0.075, 0.07
_TURNS = 4
_ABOVE_M, _BESIDE_M = 0.05, 0.01
_ASIDE = (6.0, 0.0, 0.2)
_WIDOWX = "widowx250s_bridgedataset_flat_table"
_STAGE = ASSET_DIR / "tasks/bridge_v2_real2sim_dataset/stages/bridge_table_1_v1.glb"
_START = [-0.018, 0.040, 0.222, -0.005, 1.365, 0.002, 0.037, 0.037]


class PutOnPlate(BaseEnv):  # type: ignore[misc]
    """Put a thing on the plate: it lies there, above the plate, and no finger holds it."""

    SUPPORTED_REWARD_MODES = ("sparse", "normalized_dense", "none")
    table_z, centre = 0.0, (0.0, 0.0)

    def __init__(self, *, catalogue: Catalogue, objects: str, thing: int | None, **arguments: Any) -> None:
        self._catalogue = catalogue
        self._choices = [thing] if thing is not None else _chosen(catalogue, objects)
        self._thing, self._fixed = self._choices[0], thing is not None
        super().__init__(**arguments)

    def get_language_instruction(self) -> str:
        """What to do, where the thing is the same in every episode."""
        chosen, plate = self._catalogue.things[self._thing], self._catalogue.plate
        return f"put {chosen.name} on {plate.name}" if self._fixed else ""

    @property
    def _default_sensor_configs(self) -> list[CameraConfig]:
        x, y = self.centre
        pose = sapien_utils.look_at([x + 0.35, y - 0.2, self.table_z + 0.4], [x - 0.05, y, self.table_z])
        return [CameraConfig("base_camera", pose, 128, 128, np.pi / 3, 0.01, 10)]

    @property
    def _default_human_render_camera_configs(self) -> CameraConfig:
        x, y = self.centre
        pose = sapien_utils.look_at([x + 0.5, y - 0.3, self.table_z + 0.5], [x - 0.1, y, self.table_z + 0.05])
        return CameraConfig("render_camera", pose, 512, 512, 1, 0.01, 10)

    def _load_scene(self, options: dict[str, Any]) -> None:
        self._load_table()
        wanted = [self._catalogue.things[index] for index in self._choices]
        self._bodies = [
            self._body(f"thing-{i}", thing) for i, thing in zip(self._choices, wanted, strict=True)
        ]
        self._plate = self._body("plate", self._catalogue.plate)

    def _load_table(self) -> None:
        self._table = TableSceneBuilder(env=self, robot_init_qpos_noise=0.02)
        self._table.build()

    def _body(self, name: str, thing: Thing) -> Any:
        builder = self.scene.create_actor_builder()
        x, y, z = (extent / 2 for extent in thing.size)
        if thing.shape == "model":
            builder.add_multiple_convex_collisions_from_file(
                thing.collision, scale=[thing.scale] * 3, density=thing.density
            )
            builder.add_visual_from_file(thing.visual, scale=[thing.scale] * 3)
        else:
            shapes: dict[str, dict[str, Any]] = {
                "box": {"half_size": [x, y, z]},
                "sphere": {"radius": x},
                # A cylinder's axis is x: upright.
                "cylinder": {"pose": sapien.Pose(q=[0.7071, 0, 0.7071, 0]), "radius": x, "half_length": z},
            }
            shape = shapes[thing.shape]
            getattr(builder, f"add_{thing.shape}_collision")(density=thing.density, **shape)
            getattr(builder, f"add_{thing.shape}_visual")(material=[*thing.colour, 1.0], **shape)
        builder.initial_pose = sapien.Pose(_ASIDE)
        return builder.build(name=name)

    def _initialize_episode(self, env_idx: torch.Tensor, options: dict[str, Any]) -> None:
        self._place_robot(env_idx)
        at = int(torch.randint(len(self._choices), ()))
        self._thing, self._chosen = self._choices[at], self._bodies[at]
        for number, body in enumerate(self._bodies):
            x, y, z = _ASIDE
            body.set_pose(Pose.create_from_pq(p=[x, y + 0.3 * number, z]))
        pairs = _pairs(self.centre)
        here, there = pairs[int(torch.randint(len(pairs), ()))]
        turn = float(torch.randint(_TURNS, ())) * np.pi / _TURNS
        heights = [each.size[2] / 2 for each in (self._catalogue.things[self._thing], self._catalogue.plate)]
        self._plate.set_pose(Pose.create_from_pq(p=[*there, self.table_z + heights[1] + 0.001]))
        self._chosen.set_pose(
            Pose.create_from_pq(
                p=[*here, self.table_z + heights[0] + 0.002], q=[np.cos(turn / 2), 0.0, 0.0, np.sin(turn / 2)]
            )
        )

    def _place_robot(self, env_idx: torch.Tensor) -> None:
        self._table.initialize(env_idx)

    @property
    def _gripper(self) -> torch.Tensor:
        middle: torch.Tensor = (self.agent.finger1_link.pose.p + self.agent.finger2_link.pose.p) / 2
        return middle

    def evaluate(self) -> dict[str, torch.Tensor]:
        """Whether the thing is held, lies on the plate, and that is all."""
        thing, plate = self._catalogue.things[self._thing], self._catalogue.plate
        offset = self._chosen.pose.p - self._plate.pose.p
        beside = torch.linalg.norm(offset[:, :2], dim=1) <= max(plate.size[:2]) / 2 + _BESIDE_M
        height = offset[:, 2] - (plate.size[2] + max(thing.size)) / 2
        force = torch.linalg.norm(self.scene.get_pairwise_contact_forces(self._chosen, self._plate), dim=1)
        held = self.agent.is_grasping(self._chosen)
        on = beside & (offset[:, 2] > 0) & (height <= _ABOVE_M) & (force > 0.03)
        return {"is_grasped": held, "is_on_plate": on, "success": on & ~held}

    def _get_obs_extra(self, info: dict[str, Any]) -> dict[str, torch.Tensor]:
        if "state" not in self.obs_mode:
            return {"gripper": self._gripper}
        chosen, plate = self._chosen.pose, self._plate.pose
        return {
            "gripper": self._gripper,
            "thing": chosen.raw_pose,
            "plate": plate.p,
            "apart": chosen.p - plate.p,
        }

    def compute_normalized_dense_reward(
        self, obs: Any, action: torch.Tensor, info: dict[str, torch.Tensor]
    ) -> torch.Tensor:
        """A quarter each for coming near, holding and carrying; 1 for success."""
        near = 1 - torch.tanh(5 * torch.linalg.norm(self._gripper - self._chosen.pose.p, dim=1))
        carried = 1 - torch.tanh(5 * torch.linalg.norm(self._chosen.pose.p - self._plate.pose.p, dim=1))
        moved = (info["is_grasped"] | info["is_on_plate"]).float()
        reward = (near + moved + moved * carried) / 4
        return torch.where(info["success"], torch.ones_like(reward), reward)


@register_env(PRIMITIVES, max_episode_steps=STEPS)  # type: ignore[untyped-decorator]
class PutOnPlatePrimitives(PutOnPlate):
    """Bodies of primitives on ManiSkill's table, before a Panda arm."""

    def __init__(self, *, objects: str = "train", thing: int | None = None, **arguments: Any) -> None:
        super().__init__(
            catalogue=primitives(), objects=objects, thing=thing, **{"robot_uids": "panda", **arguments}
        )

    def _load_agent(self, options: dict[str, Any]) -> None:
        super()._load_agent(options, sapien.Pose(p=[-0.615, 0, 0]))


@register_env(MAIN, max_episode_steps=STEPS)  # type: ignore[untyped-decorator]
class PutOnPlateInScene(PutOnPlate):
    """Models of a folder on the table of the Bridge data, before a WidowX arm. Unverified: its assets were not here."""

    table_z, centre = 0.87, (-0.16, 0.0)

    def __init__(
        self, *, assets_dir: str = "", objects: str = "train", thing: int | None = None, **arguments: Any
    ) -> None:
        own = {"robot_uids": _WIDOWX, **arguments}
        super().__init__(catalogue=from_assets(assets_dir), objects=objects, thing=thing, **own)

    @property
    def _default_sim_config(self) -> SimConfig:
        return SimConfig(sim_freq=500, control_freq=5)

    def _load_agent(self, options: dict[str, Any]) -> None:
        super()._load_agent(options, sapien.Pose(p=[0.127, 0.060, 0.85], q=[0, 0, 0, 1]))

    def _load_table(self) -> None:
        builder, pose = self.scene.create_actor_builder(), sapien.Pose(q=[0.7071, 0.7071, 0, 0])
        builder.add_nonconvex_collision_from_file(str(_STAGE), pose=pose)
        builder.add_visual_from_file(str(_STAGE), pose=pose)
        builder.initial_pose = sapien.Pose([2.0634, 2.8313, 0.0])
        builder.build_static(name="arena")

    def _place_robot(self, env_idx: torch.Tensor) -> None:
        self.agent.robot.set_pose(sapien.Pose([0.147, 0.028, 0.870], q=[0, 0, 0, 1]))
        self.agent.reset(init_qpos=np.array(_START))


def perturbations(name: str) -> dict[str, dict[str, Any]]:
    """By name, the options with which a task's things are others; a task of one thing has none."""
    task, _, index = name.partition("/")
    return {"unseen_objects": {"objects": "test"}} if task in TASKS and not index else {}


def options_of(name: str, options: dict[str, Any]) -> dict[str, Any]:
    """Arguments of a task NAME or NAME/THING. Raises BackendError: its assets, or its thing, are not there."""
    task, _, index = name.partition("/")
    catalogue = primitives() if task == PRIMITIVES else from_assets(str(options.get("assets_dir", "")))
    if task == MAIN and not _STAGE.is_file() and "robot_uids" not in options:
        raise BackendError(
            "environment.name",
            f"{task} needs the table of the Bridge data and the arm WidowX: run `python -m "
            "mani_skill.utils.download_asset bridge_v2_real2sim` and `… widowx250s` where there is a network, and set "
            f"MS_ASSET_DIR ({_STAGE} is missing)",
        )
    if index and not (index.isdecimal() and int(index) < len(catalogue.things)):
        raise BackendError(
            "environment.name", f"there is no thing {index!r}; write {task}/0 to /{len(catalogue.things) - 1}"
        )
    _chosen(catalogue, str(options.get("objects", "train")))
    return {**options, "thing": int(index)} if index else options


def _chosen(catalogue: Catalogue, objects: str) -> list[int]:
    every = range(len(catalogue.things))
    sets = {"train": every[:TRAINED], "test": every[TRAINED:], "all": every}
    if not sets.get(objects):
        raise BackendError("options_json.objects", f"there are no things {objects!r}; use train, test or all")
    return list(sets[objects])


def _pairs(centre: tuple[float, float]) -> list[tuple[tuple[float, float], tuple[float, float]]]:
    """Places of thing and plate: two of a grid that are not too near to each other."""
    line = np.linspace(-_HALF_EDGE_M, _HALF_EDGE_M, _GRID)
    grid = [(float(centre[0] + x), float(centre[1] + y)) for x in line for y in line]
    return [(a, b) for a in grid for b in grid if np.hypot(a[0] - b[0], a[1] - b[1]) > _APART_M]

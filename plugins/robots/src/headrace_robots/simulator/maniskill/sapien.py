"""What a variant may change of a ManiSkill environment: lights, cameras, surfaces, bodies and drives of its scene.

One scene in a process, on the CPU. Tasks that build their scene anew at a reset keep what was turned.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import sapien
from headrace_simulator.backends.base import Knob
from headrace_simulator.backends.colours import turned


def knobs(environment: Any) -> dict[str, Knob]:
    """Knobs of an environment by their names in a variant; each works from the next reset on."""
    base, values = environment.unwrapped, dict[str, float]()
    scene = _parts(base)
    built: Callable[[dict[str, Any]], None] = base._after_reconfigure

    def turn(name: str, value: float) -> None:
        values[name] = value
        scene[name](value)

    def rebuilt(options: dict[str, Any]) -> None:
        nonlocal scene
        built(options)
        scene = _parts(base)
        for name, value in values.items():
            scene[name](value)

    # ManiSkill's own place for what a new scene needs, before an episode begins in it.
    base._after_reconfigure = rebuilt
    return {name: partial(turn, name) for name in scene}


def _parts(base: Any) -> dict[str, Knob]:
    """The knobs of the scene as it is now."""
    components = [part for entity in base.scene.sub_scenes[0].entities for part in entity.components]
    bodies = [part for part in components if isinstance(part, sapien.physx.PhysxRigidBodyComponent)]
    found = {
        "execution.mass": _scale_all(bodies, "mass", "inertia"),
        "execution.friction": _scale_all(_materials(components), "static_friction", "dynamic_friction"),
        "execution.stiffness": _drives(base, stiffness=True),
        "execution.damping": _drives(base, stiffness=False),
    }
    if base.scene.can_render():
        lights = [part for part in components if isinstance(part, sapien.render.RenderLightComponent)]
        found |= {
            "vision.lighting": _lighting(base.scene.sub_scenes[0].render_system, lights),
            "vision.camera": _cameras(base),
            "vision.hue": _hue(list(_surfaces(components))),
        }
    return found


def _scale_all(things: list[Any], *names: str) -> Knob:
    """Sets attributes to a factor times what they are now."""
    nominal = [(thing, name, np.copy(getattr(thing, name))) for thing in things for name in names]

    def turn(factor: float) -> None:
        for thing, name, value in nominal:
            scaled = value * factor
            setattr(thing, name, scaled if scaled.ndim else float(scaled))

    return turn


def _materials(components: list[Any]) -> list[Any]:
    colliders = [part for part in components if isinstance(part, sapien.physx.PhysxRigidBaseComponent)]
    return [shape.physical_material for part in colliders for shape in part.collision_shapes]


def _drives(base: Any, *, stiffness: bool) -> Knob:
    """Of the robot's joints, as its controllers set them."""
    joints = [] if base.agent is None else [each._objs[0] for each in base.agent.robot.active_joints]
    nominal = [(joint.stiffness, joint.damping) for joint in joints]

    def turn(factor: float) -> None:
        # Where the knobs of both are turned, each leaves the other's value.
        for joint, (stiff, damped) in zip(joints, nominal, strict=True):
            values = (stiff * factor, joint.damping) if stiffness else (joint.stiffness, damped * factor)
            joint.set_drive_properties(*values, joint.force_limit, joint.drive_mode)

    return turn


def _lighting(system: Any, lights: list[Any]) -> Knob:
    ambient, colours = np.copy(system.ambient_light), [np.copy(light.color) for light in lights]

    def turn(factor: float) -> None:
        system.ambient_light = ambient * factor
        for light, colour in zip(lights, colours, strict=True):
            light.color = colour * factor

    return turn


def _cameras(base: Any) -> Knob:
    """Of observations and of pictures. A camera's y points to its left."""
    sensors = [*base._sensors.values(), *base._human_render_cameras.values()]
    cameras = [sensor.camera for sensor in sensors if hasattr(sensor, "camera")]
    poses = [camera.local_pose for camera in cameras]

    def turn(metres: float) -> None:
        for camera, pose in zip(cameras, poses, strict=True):
            camera.set_local_pose(pose * sapien.Pose([0.0, -metres, 0.0]))

    return turn


def _surfaces(components: list[Any]) -> Iterator[Any]:
    """The materials of everything that is drawn."""
    for body in components:
        if isinstance(body, sapien.render.RenderBodyComponent):
            for shape in body.render_shapes:
                if isinstance(shape, sapien.render.RenderShapeTriangleMesh):
                    yield from (part.material for part in shape.parts)
                else:
                    yield shape.material


def _hue(materials: list[Any]) -> Knob:
    colours = [np.asarray(material.base_color, np.float32) for material in materials]
    textures: dict[int, tuple[Any, np.ndarray]] = {}

    def turn(part: float) -> None:
        if not textures and part:
            for place, material in enumerate(materials):
                texture = material.base_color_texture
                if texture is not None and texture.channels >= 3:
                    textures[place] = texture, texture.download()
        for material, colour in zip(materials, colours, strict=True):
            material.base_color = [float(each) for each in turned(colour, part)]
        for texture, pixels in textures.values():
            texture.upload(turned(pixels, part))

    return turn

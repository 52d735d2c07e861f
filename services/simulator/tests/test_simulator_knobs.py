"""What a variant changes in a real simulator: pixels, the execution, or what the task is and says. In one process.

As the contract suite, of the simulator in BACKEND_UNDER_TEST: `make test-simulators SIM=maniskill` runs this file too.
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
from headrace_simulator import backends
from headrace_simulator.backends.base import BackendError
from headrace_simulator.child.variants import split, varied

pytestmark = pytest.mark.timeout(600)
UNDER_TEST = os.environ.get("BACKEND_UNDER_TEST", "gymnasium")
VISION = {"lighting": (0.4, 1.0), "camera": (0.1, 0.0), "hue": (0.33, 0.0)}
"""By name, a value that is seen, and the one that changes nothing."""


@dataclass(frozen=True)
class Case:
    """An environment that shows `image`; `execution` has factors that change an episode of `action`.

    `noise` is how much the mean of a picture's pixels may differ between two of the same scene.
    """

    name: str
    options: dict[str, Any]
    image: str
    action: list[float]
    execution: dict[str, float] = field(default_factory=dict)
    noise: float = 0.0


CASES = {
    "metaworld": Case("reach-v3", {"image_size": 64}, "rgb", [1, 0.5, -1, 0], {"gravity": 0.1, "mass": 3.0}),
    "maniskill": Case(
        "PushCube-v1",
        {"obs_mode": "rgb", "control_mode": "pd_ee_delta_pos", "sensor_configs": {"width": 64, "height": 64}},
        "sensor_data.base_camera.rgb",
        [1, 0, -0.5, -1],
        {"mass": 5.0, "stiffness": 0.3, "damping": 3.0},
    ),
    "libero": Case(
        "libero_spatial/0",
        {"cameras": ["agentview"], "image_size": 64, "settle_steps": 0, "reflections": False},
        "agentview_image",
        [0.5, 0.3, -0.5, 0, 0, 0, -1],
        {"mass": 5.0, "gravity": 0.5},
    ),
}
TESTED = [(UNDER_TEST, CASES[UNDER_TEST])] if UNDER_TEST in CASES else []
real = pytest.mark.parametrize(("simulator", "case"), TESTED, ids=[name for name, _ in TESTED])


def made(simulator, case, variant, **more):
    """A task in a variant; its images too unless `options` says otherwise."""
    backend, name = backends.create(simulator), more.get("name", case.name)
    chosen, options = split({**more.get("options", case.options), "variant": variant}, backend, name)
    return varied(backend.make(name, options, own_time_limit=False, dense=False), chosen)


def episode(environment, case, variant):
    """(picture, numbers that are no picture) behind three actions of an episode in a variant."""
    chosen, _ = split({"variant": variant}, backends.create(UNDER_TEST), case.name)
    varied(environment, chosen).reset(3, {}, 0 if environment.init_state_count else None)
    for _ in range(3):
        last = environment.step(np.array(case.action, np.float32))
    seen = last.observation
    numbers = [np.ravel(seen[name]) for name in sorted(seen) if seen[name].ndim < 2 and "param" not in name]
    return seen[case.image].astype(np.float64), np.concatenate(numbers)


def apart(first, second):
    return float(np.abs(first - second).mean())


@real
def test_vision_changes_pixels_and_execution_what_happens(simulator, case):
    """All of it follows from the seed, and ends with the variant."""
    environment = made(simulator, case, {})
    plain = episode(environment, case, {})
    for name, (value, nothing) in VISION.items():
        seen, again = (episode(environment, case, {"vision": {name: value}}) for _ in range(2))
        assert apart(seen[0], plain[0]) > 2, name
        assert apart(seen[0], again[0]) <= case.noise, name
        np.testing.assert_array_equal(seen[1], plain[1])
        back = episode(environment, case, {"vision": {name: nothing}})
        assert apart(back[0], plain[0]) <= case.noise, name
    for name, factor in case.execution.items():
        seen, again = (episode(environment, case, {"execution": {name: factor}}) for _ in range(2))
        assert apart(seen[1], plain[1]) > 1e-5, name
        np.testing.assert_array_equal(seen[1], again[1])
        back = episode(environment, case, {"execution": {name: 1.0}})
        np.testing.assert_array_equal(back[1], plain[1])
    environment.close()


@pytest.mark.skipif(UNDER_TEST != "maniskill", reason="a scene of SAPIEN")
def test_a_scene_that_is_built_anew_keeps_what_was_turned():
    case = CASES["maniskill"]
    environment = made("maniskill", case, {}, options={**case.options, "reconfiguration_freq": 1})
    plain = episode(environment, case, {})
    dark = episode(environment, case, {"vision": {"lighting": 0.3}})
    assert dark[0].mean() < 0.7 * plain[0].mean()


@pytest.mark.skipif(UNDER_TEST != "maniskill", reason="things to put on a plate")
def test_unseen_objects_are_those_that_are_not_trained_on():
    from headrace_robots.simulator.maniskill.things import TRAINED

    options, name = {"obs_mode": "state"}, "PutOnPlatePrimitives-v1"
    things = []
    for perturbation in ("", "unseen_objects"):
        variant = {"semantic": {"perturbation": perturbation}}
        environment = made("maniskill", CASES["maniskill"], variant, options=options, name=name)
        inner = getattr(environment, "_environment", environment)
        base = getattr(inner, "_environment", inner).unwrapped
        things.append(set())
        for seed in range(4):
            environment.reset(seed, {}, None)
            things[-1].add(base._thing)
        environment.close()
    assert max(things[0]) < TRAINED <= min(things[1])


@pytest.mark.skipif(UNDER_TEST != "libero", reason="LIBERO-PRO's perturbations")
def test_perturbations_change_words_objects_or_places():
    case, options = CASES["libero"], {"settle_steps": 0}
    words, states = {}, {}
    for name in ("", "language", "object", "position", "task"):
        environment = made("libero", case, {"semantic": {"perturbation": name}}, options=options)
        words[name] = environment.instruction
        states[name] = environment.reset(0, {}, 0)[0]["object-state"]
        assert environment.init_state_count >= 10
        environment.close()
    assert words[""].startswith("pick up the black bowl between the plate and the ramekin")
    assert words["language"].startswith("lift the black bowl") and "not between" in words["task"]
    assert words["object"] == words["position"] == words[""]
    assert not np.allclose(states["position"], states[""], atol=0.05)
    with pytest.raises(BackendError) as refused:
        made("libero", case, {"semantic": {"perturbation": "languag"}})
    assert "did you mean 'language'" in refused.value.message and "position" in refused.value.message


@pytest.mark.skipif(UNDER_TEST != "libero", reason="LIBERO's suites")
def test_a_suite_without_perturbations_says_so():
    with pytest.raises(BackendError) as refused:
        made("libero", CASES["libero"], {"semantic": {"perturbation": "language"}}, name="libero_90/0")
    assert refused.value.field == "options_json.variant.semantic.perturbation"
    assert "it has none" in refused.value.message


@pytest.mark.skipif(UNDER_TEST != "libero", reason="LIBERO's conventions")
def test_a_gripper_opens_and_closes_as_published_policies_say():
    """LIBERO takes -1 to open it, and so do openpi's policies; OpenVLA's say 1."""
    says = {"": (-1, 1), "openpi": (-1, 1), "openvla": (1, 0)}
    widths = {}
    for convention, actions in says.items():
        options = {"settle_steps": 0, "convention": convention}
        environment = made("libero", CASES["libero"], {}, options=options)
        first = environment.reset(0, {}, 0)[0]
        assert [*first] == ["state"] if convention else "object-state" in first
        for gripper in actions:
            for _ in range(12):
                seen = environment.step(np.array([0, 0, 0, 0, 0, 0, gripper], np.float32)).observation
            fingers = seen["state"][6:] if convention else seen["robot0_gripper_qpos"]
            widths[convention, gripper] = float(fingers[0] - fingers[1])
        environment.close()
    opened, closed = widths["", -1], widths["", 1]
    assert opened > 0.06 > 0.01 > closed
    assert [widths["openpi", -1], widths["openpi", 1]] == [opened, closed]
    assert [widths["openvla", 1], widths["openvla", 0]] == [opened, closed]

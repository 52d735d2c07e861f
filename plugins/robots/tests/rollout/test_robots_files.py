"""Robot policies that an instance reads from disk or draws, and what a run of them must name."""

from __future__ import annotations

import json

from episode_rig import PENDULUM, new_policy, open_robot
from headrace.rollout.v1 import rollout_pb2
from headrace_rollout import workloads
from headrace_servicekit.registry import Registry
from rollout_calls import HEADER, install_files, refused


async def test_a_robot_policy_begins_from_its_seed_and_goes_on_from_a_checkpoint(
    new_rollout, publish, checkpoint
):
    rollout = await new_rollout()
    await open_robot(rollout)  # its seed is 7
    response = await install_files(rollout)
    assert response.version.digest == publish(new_policy(seed=7), 1).version.digest
    trained = new_policy(seed=3)
    published, directory = publish(trained, 4), checkpoint(trained)
    response = await install_files(rollout, 4, published.version.digest, directory)
    assert response.version.digest == published.version.digest
    wrong = checkpoint(new_policy({**PENDULUM, "state_size": 4}), "step-2")
    await refused(install_files(rollout, 5, checkpoint=wrong), "MODEL_NOT_READABLE", "shape")


async def test_a_robot_policy_and_its_environment_come_together(new_rollout, tiny_directory):
    rollout = await new_rollout()

    def opening(**config):
        text = json.dumps({"seed": 7, **config})
        return rollout.stub.OpenRun(rollout_pb2.OpenRunRequest(header=HEADER, config_json=text))

    environment = {"tasks": ["Pendulum-v1"]}
    await refused(opening(model={"policy": PENDULUM}), "MODEL_NOT_READABLE", "environment")
    text = {"path": str(tiny_directory)}
    await refused(opening(model=text, environment=environment), "MODEL_NOT_READABLE", "policy.json")
    odd = {"policy": {**PENDULUM, "kind": "mpl"}}
    await refused(opening(model=odd, environment=environment), "MODEL_NOT_READABLE", "mlp")
    unbounded = {"policy": {"kind": "mlp"}}
    await refused(opening(model=unbounded, environment=environment), "MODEL_NOT_READABLE", "bounds")


async def test_without_the_plugin_a_robot_policy_is_refused_by_its_key(new_rollout, monkeypatch):
    monkeypatch.setattr(workloads, "WORKLOADS", Registry("headrace.none", "workload", "model", "model", {}))
    await refused(open_robot(await new_rollout()), "MODEL_NOT_READABLE", "model.policy: no plug-in")

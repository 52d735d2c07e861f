"""Weights that an instance reads from disk: the model's own, and a trainer's checkpoint."""

import json

import pytest
import torch
from episode_rig import PENDULUM, new_policy, open_robot
from headrace.rollout.v1 import rollout_pb2
from headrace_modelkit.presets.tiny import tiny_model
from headrace_modelkit.weights import state_tensors
from rollout_calls import HEADER, refused
from safetensors.torch import save_file


@pytest.fixture
def checkpoint(tmp_path):
    """A trainer's checkpoint of a model: its masters by name."""

    def write(model, name="step-1"):
        directory = tmp_path / name
        directory.mkdir()
        tensors = {key: value.detach().clone() for key, value in state_tensors(model)}
        save_file(tensors, directory / "weights.safetensors")
        return str(directory)

    return write


def install(rollout, number=1, digest="", checkpoint=""):
    request = rollout_pb2.InstallPolicyRequest(
        header=HEADER, files=rollout_pb2.PolicyFiles(checkpoint=checkpoint)
    )
    request.version.number, request.version.digest = number, digest
    return rollout.stub.InstallPolicy(request)


async def test_the_models_own_weights_are_what_a_trainer_would_publish(
    new_rollout, tiny_directory, assignments, publish, reference
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    response = await install(rollout)
    assert response.version.digest == publish(reference, 1).version.digest
    assert (await install(rollout)).version == response.version, "a repetition reads nothing again"
    assert len(await (await rollout.generate(assignments[:1]).start()).read_all()) == 3


async def test_a_checkpoint_is_cast_and_compared_with_its_versions_digest(
    new_rollout, tiny_directory, publish, checkpoint
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    model = tiny_model(seed=3)
    published, directory = publish(model, 4), checkpoint(model)
    response = await install(rollout, 4, published.version.digest, directory)
    assert response.version.digest == published.version.digest
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    other = checkpoint(model, "step-2")
    await refused(
        install(rollout, 5, published.version.digest, other), "MODEL_NOT_READABLE", "step-2", "damaged"
    )


async def test_a_checkpoint_that_is_not_there_or_of_another_model_is_named(
    new_rollout, tiny_directory, checkpoint, tmp_path
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    await refused(install(rollout, checkpoint=str(tmp_path / "gone")), "MODEL_NOT_READABLE", "gone", "pruned")
    wrong = checkpoint(tiny_model(vocab_size=40))
    await refused(install(rollout, checkpoint=wrong), "MODEL_NOT_READABLE", "shape", "model of the run")


async def test_a_robot_policy_begins_from_its_seed_and_goes_on_from_a_checkpoint(
    new_rollout, publish, checkpoint
):
    rollout = await new_rollout()
    await open_robot(rollout)  # its seed is 7
    response = await install(rollout)
    assert response.version.digest == publish(new_policy(seed=7), 1).version.digest
    trained = new_policy(seed=3)
    published, directory = publish(trained, 4), checkpoint(trained)
    response = await install(rollout, 4, published.version.digest, directory)
    assert response.version.digest == published.version.digest
    wrong = checkpoint(new_policy({**PENDULUM, "state_size": 4}), "step-2")
    await refused(install(rollout, 5, checkpoint=wrong), "MODEL_NOT_READABLE", "shape")


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

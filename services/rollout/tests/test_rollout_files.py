"""Weights that an instance reads from disk: the model's own, and a trainer's checkpoint."""

import torch
from headrace_modelkit.presets.tiny import tiny_model
from rollout_calls import install_files, refused


async def test_the_models_own_weights_are_what_a_trainer_would_publish(
    new_rollout, tiny_directory, assignments, publish, reference
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    response = await install_files(rollout)
    assert response.version.digest == publish(reference, 1).version.digest
    assert (await install_files(rollout)).version == response.version, "a repetition reads nothing again"
    assert len(await (await rollout.generate(assignments[:1]).start()).read_all()) == 3


async def test_a_checkpoint_is_cast_and_compared_with_its_versions_digest(
    new_rollout, tiny_directory, publish, checkpoint
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    model = tiny_model(seed=3)
    published, directory = publish(model, 4), checkpoint(model)
    response = await install_files(rollout, 4, published.version.digest, directory)
    assert response.version.digest == published.version.digest
    with torch.no_grad():
        next(model.parameters()).add_(1.0)
    other = checkpoint(model, "step-2")
    await refused(
        install_files(rollout, 5, published.version.digest, other), "MODEL_NOT_READABLE", "step-2", "damaged"
    )


async def test_a_checkpoint_that_is_not_there_or_of_another_model_is_named(
    new_rollout, tiny_directory, checkpoint, tmp_path
):
    rollout = await new_rollout()
    await rollout.open(tiny_directory)
    await refused(
        install_files(rollout, checkpoint=str(tmp_path / "gone")), "MODEL_NOT_READABLE", "gone", "pruned"
    )
    wrong = checkpoint(tiny_model(vocab_size=40))
    await refused(install_files(rollout, checkpoint=wrong), "MODEL_NOT_READABLE", "shape", "model of the run")

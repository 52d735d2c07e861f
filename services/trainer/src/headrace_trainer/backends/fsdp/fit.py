"""Whether a checkpoint is of this run's model and optimizer: by names and shapes, before anything is loaded."""

from __future__ import annotations

from headrace_modelkit.critic import Critic
from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import state_tensors
from headrace_schema.sections.generating import ModelSection

from headrace_trainer.backends._base import StateReader
from headrace_trainer.backends.fsdp.optimizer import MOMENTS
from headrace_trainer.backends.fsdp.sharding import CRITIC
from headrace_trainer.errors import Refusal


def check_fit(reader: StateReader, config: ModelSection, critic: Critic | None) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH with `key` model.path, optimizer or algorithm.options.critic.

    Raises ModelNotReadable too. A checkpoint's critic is left out where the run has none.
    """
    own = {name: tuple(tensor.shape) for name, tensor in state_tensors(load_model(config, weights=False))}
    check_state_shapes(reader, own, repr(config.path))
    if critic is not None:
        _check_critic(reader.critic_shapes(), critic)


def check_state_shapes(
    reader: StateReader, own: dict[str, tuple[int, ...]], model: str, key: str = "model.path"
) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH unless weights of these shapes and AdamW's moments are there."""
    if problem := _difference(reader.weight_shapes(), own):
        raise _mismatch(
            key,
            f"{model} is not the model of the checkpoint: {problem}; name the model that it was made with",
        )
    if (kinds := reader.moment_kinds()) != set(MOMENTS):
        found = ", ".join(sorted(kinds)) or "none"
        raise _mismatch(
            "optimizer",
            f"the checkpoint has the optimizer state {found}, this run's AdamW has {', '.join(MOMENTS)}; "
            "name a checkpoint that AdamW made",
        )


def _check_critic(saved: dict[str, tuple[int, ...]], critic: Critic) -> None:
    key = "algorithm.options.critic"
    if not saved:
        raise _mismatch(
            key,
            "the checkpoint has no critic: the algorithm that made it had none; export its model and name that as "
            "model.path, or name a checkpoint that was made with a critic",
        )
    own = {f"{CRITIC}{name}": tuple(tensor.shape) for name, tensor in critic.tensors()}
    if problem := _difference(saved, own):
        raise _mismatch(
            key, f"the checkpoint has another critic: {problem}; set the critic's options as they were"
        )


def _difference(saved: dict[str, tuple[int, ...]], own: dict[str, tuple[int, ...]]) -> str:
    for name in sorted(saved.keys() & own.keys()):
        if saved[name] != own[name]:
            return f"{name} has the shape {list(saved[name])} there and {list(own[name])} here"
    if missing := own.keys() - saved.keys():
        return f"it has no {min(missing)} ({len(missing)} missing)"
    if extra := saved.keys() - own.keys():
        return f"it has {min(extra)}, which the model has not ({len(extra)} of them)"
    return ""


def _mismatch(key: str, message: str) -> Refusal:
    return Refusal("CHECKPOINT_MISMATCH", f"{key}: {message}", key=key)

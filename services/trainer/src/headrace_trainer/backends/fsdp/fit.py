"""Whether a checkpoint is of this run's model and optimizer: by names and shapes, before anything is loaded."""

from __future__ import annotations

from headrace_modelkit.loading import load_model
from headrace_modelkit.weights import state_tensors
from headrace_schema.generating import ModelSection

from headrace_trainer.backends._base import StateReader
from headrace_trainer.backends.fsdp.optimizer import MOMENTS
from headrace_trainer.errors import Refusal


def check_fit(reader: StateReader, config: ModelSection) -> None:
    """Raises Refusal CHECKPOINT_MISMATCH with `key` model.path or optimizer, or ModelNotReadable."""
    own = {name: tuple(tensor.shape) for name, tensor in state_tensors(load_model(config, weights=False))}
    if problem := _difference(reader.weight_shapes(), own):
        raise _mismatch(
            "model.path",
            f"{config.path!r} is not the model of the checkpoint: {problem}; name the model that it was made with",
        )
    if (kinds := reader.moment_kinds()) != set(MOMENTS):
        found = ", ".join(sorted(kinds)) or "none"
        raise _mismatch(
            "optimizer",
            f"the checkpoint has the optimizer state {found}, this run's AdamW has {', '.join(MOMENTS)}; "
            "name a checkpoint that AdamW made",
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

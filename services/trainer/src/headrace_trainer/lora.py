"""What a run with adapters needs of its model and algorithm: checked as the run opens, before weights are read."""

from __future__ import annotations

import torch
from headrace_modelkit.loading import load_model
from headrace_modelkit.lora import targets_problem
from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms._base import Algorithm
from headrace_trainer.errors import invalid
from headrace_trainer.kinds import DEFAULT_BACKEND


def check_lora(config: TrainerConfig, algorithm: Algorithm) -> None:
    """Raises Refusal INVALID, naming the key, where adapters cannot be trained; and ModelNotReadable."""
    trainer = config.trainer
    if trainer.lora is None:
        return
    fix = ", or leave trainer.lora out"
    if trainer.backend != DEFAULT_BACKEND:
        reason = f"{trainer.backend} has no adapters; set trainer.backend: {DEFAULT_BACKEND}{fix}"
        raise invalid(f"trainer.lora: {reason}", key="trainer.lora")
    if trainer.helpers:
        reason = (
            f"a helper holds published weights, in which adapters are merged; set trainer.helpers: 0{fix}"
        )
        raise invalid(f"trainer.helpers: {reason}", key="trainer.helpers")
    if algorithm.critic is not None and algorithm.critic.own_model:
        reason = f"{config.algorithm.name} has a critic with a model of its own, which has no adapters"
        raise invalid(
            f"trainer.lora: {reason}; take a critic that is a head of the policy{fix}", key="trainer.lora"
        )
    with torch.device("meta"):
        model = load_model(config.model, weights=False)
    if problem := targets_problem(model, trainer.lora):
        raise invalid(f"trainer.lora.targets: {problem}", key="trainer.lora.targets")

"""What a run that learns from answers needs of its model, algorithm and backend: checked as it opens, before weights
are read.
"""

from __future__ import annotations

import torch
from headrace_modelkit.critic import check_critic, critic_section
from headrace_modelkit.errors import ModelNotReadable
from headrace_modelkit.loading import load_architecture, load_model
from headrace_modelkit.lora import targets_problem
from headrace_schema.openings import TrainerConfig

from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import REFERENCE_LOG_PROBS, Algorithm
from headrace_trainer.backends import choose_backend
from headrace_trainer.errors import invalid
from headrace_trainer.kinds import DEFAULT_BACKEND


def check_answers_run(config: TrainerConfig) -> tuple[Algorithm, int]:
    """The run's algorithm, and how many words its model knows. Raises Refusal INVALID or MODEL_NOT_READABLE."""
    backend = choose_backend(config.trainer)
    algorithm = build_algorithm(config.algorithm)
    try:
        architecture = load_architecture(config.model)
        backend.check(config, algorithm)
        if (critic := algorithm.critic) is not None and critic.path is not None:
            section = critic_section(config.model, critic.path)
            check_critic(config.model, section, "algorithm.options.critic_path")
        _check_lora(config, algorithm)
    except ModelNotReadable as error:
        raise invalid(str(error), "MODEL_NOT_READABLE") from error
    vocabulary = int(architecture.get_text_config().vocab_size)
    _check_reference(config, algorithm, vocabulary)
    return algorithm, vocabulary


def _check_lora(config: TrainerConfig, algorithm: Algorithm) -> None:
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


def _check_reference(config: TrainerConfig, algorithm: Algorithm, vocabulary: int) -> None:
    """Raises Refusal INVALID or MODEL_NOT_READABLE for a reference that is not used, or that does not fit."""
    section, key, name = config.trainer.reference, "trainer.reference", config.algorithm.name
    if section is None:
        if algorithm.needs_teacher:
            raise invalid(f"{key}: {name} learns from a teacher; give its path", key=key)
        return
    if REFERENCE_LOG_PROBS not in algorithm.columns:
        raise invalid(
            f"{key}: no option of {name} uses it; set kl_loss_coef above 0, or leave it out", key=key
        )
    try:
        own = int(load_architecture(section).get_text_config().vocab_size)
    except ModelNotReadable as error:
        text = str(error).replace("model.path", f"{key}.path", 1)
        raise invalid(text, "MODEL_NOT_READABLE", key=f"{key}.path") from error
    if own < vocabulary:
        raise invalid(
            f"{key}.path: its vocabulary of {own} tokens is smaller than the policy's of {vocabulary}; give a model "
            "with the same tokenizer",
            key=f"{key}.path",
        )

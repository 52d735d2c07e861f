"""What a run learns from: answers of a language model, or episodes of a robot policy. Chooses its parts by that."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import cast

from headrace_modelkit.loading import DTYPES, load_model, save_model
from headrace_modelkit.lora import save_adapter
from headrace_modelkit.robot.directory import policy_of, save_policy
from headrace_modelkit.tokenizer import load_tokenizer
from headrace_modelkit.weights import load_weights
from headrace_schema.openings import TrainerConfig
from torch import Tensor

from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.algorithms._base import Algorithm, Barrier
from headrace_trainer.algorithms.episodes import build_episode_algorithm
from headrace_trainer.algorithms.episodes._base import EpisodeAlgorithm
from headrace_trainer.backends import build_backend
from headrace_trainer.backends._base import Backend
from headrace_trainer.backends.robot.backend import RobotBackend
from headrace_trainer.backends.robot.cloning import check_demonstrations
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.batch import BatchLearner
from headrace_trainer.learning.episodes.learner import EpisodeLearner
from headrace_trainer.learning.learner import Learner
from headrace_trainer.learning.packing.work import StepRounds

AnyLearner = Learner | BatchLearner | EpisodeLearner

DEFAULT_BACKEND = "fsdp"


def learns_from_episodes(config: TrainerConfig) -> bool:
    """Whether the model is a robot policy. Raises ModelNotReadable."""
    return policy_of(config.model) is not None


def run_algorithm(config: TrainerConfig) -> Algorithm:
    """The algorithm of the run. Raises Refusal INVALID, naming the key, and ModelNotReadable."""
    if learns_from_episodes(config):
        return build_episode_algorithm(config.algorithm)
    return build_algorithm(config.algorithm)


def run_backend(config: TrainerConfig, algorithm: Algorithm, trainer_group: TrainerGroup) -> Backend:
    """The backend of the run, without weights yet."""
    if learns_from_episodes(config):
        return RobotBackend(config, cast(EpisodeAlgorithm, algorithm), trainer_group)
    return build_backend(config, algorithm, trainer_group)


def run_learner(config: TrainerConfig, algorithm: Algorithm, rounds: StepRounds) -> AnyLearner:
    """What the leader learns with."""
    if learns_from_episodes(config):
        return EpisodeLearner(config, cast(EpisodeAlgorithm, algorithm), rounds)
    kind = BatchLearner if algorithm.barrier is Barrier.BATCH else Learner
    return kind(config, algorithm, rounds)


def export_model(
    config: TrainerConfig, weights: Mapping[str, Tensor], target: Path, adapters: Mapping[str, Tensor]
) -> None:
    """Writes weights in model.dtype as a Hugging Face directory, or a robot policy's as `save_policy` does, with its
    tokenizer. Adapters, which are merged into the weights, go by themselves into `adapter/`, in peft's format.
    """
    if (policy := policy_of(config.model)) is not None:
        built = policy.build(config.seed)
        load_weights(built, weights)
        save_policy(built, target, tokenizer=config.model.path or None)
        return
    dtype = DTYPES[config.model.dtype]
    cast_weights = {
        name: value.to(dtype) if value.is_floating_point() else value for name, value in weights.items()
    }
    model = load_model(config.model, weights=False)
    load_weights(model, cast_weights)
    lora = config.trainer.lora

    def save_beside(directory: Path) -> None:
        if lora is not None:
            save_adapter(directory / "adapter", lora, adapters, config.model.path)

    save_model(model, load_tokenizer(config.model), target, beside=save_beside)


def check_episode_run(config: TrainerConfig) -> None:
    """Raises Refusal INVALID, naming the key, for a section that a run of episodes does not read."""
    trainer = config.trainer
    if trainer.backend != DEFAULT_BACKEND:
        reason = f"{trainer.backend!r} trains language models; a robot policy has a backend of its own: leave it out"
        raise invalid(f"trainer.backend: {reason}", key="trainer.backend")
    idle = {
        "trainer.backend_options": bool(trainer.backend_options),
        "trainer.reference": trainer.reference is not None,
        "trainer.lora": trainer.lora is not None,
        "trainer.gradient_checkpointing": trainer.gradient_checkpointing,
    }
    for key in (key for key, given in idle.items() if given):
        raise invalid(f"{key}: is for language models; leave it out", key=key)
    check_demonstrations(config)

"""How far the gradient of streamed groups is from the gradient of one batch, through the trainer's own backend."""

from __future__ import annotations

import math
import random
from pathlib import Path

import torch
from headrace_servicekit.digests import set_digest
from headrace_trainer import step as steps
from headrace_trainer.algorithms import build_algorithm
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.config import TrainerConfig
from headrace_trainer.gang import join_gang
from headrace_trainer.learner import Learner
from headrace_trainer.samples import Group, Member
from torch import Tensor

PROMPT_TOKENS = 12


def gradient_difference(
    model: Path, vocabulary: int, dtype: str, *, groups: int, size: int, longest: int
) -> float:
    """Relative L2 distance of the pre-clip gradients, groups one at a time in order of length against all at once."""
    config = TrainerConfig.model_validate(
        {
            "model": {"path": str(model), "dtype": dtype},
            "algorithm": {"group_size": size, "prompts_per_step": groups},
        }
    )
    made = [_group(prompt, size, longest, vocabulary) for prompt in range(groups)]
    arrival = sorted(made, key=lambda group: max(len(member.trained) for member in group.members))
    gang = join_gang(1, 0, 1, "", 30.0, torch.device("cpu"))
    try:
        backend = FsdpBackend(config, build_algorithm(config.algorithm), gang)
        backend.load_initial()
        batch = _gradient(config, backend, [made])
        streamed = _gradient(config, backend, [[group] for group in arrival])
    finally:
        gang.leave()
    return relative_l2(streamed, batch)


def relative_l2(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Distance of two gradients by name, relative to the second."""
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return math.sqrt(difference / sum(float(value.double().square().sum()) for value in other.values()))


def _gradient(config: TrainerConfig, backend: FsdpBackend, arrivals: list[list[Group]]) -> dict[str, Tensor]:
    state = steps.restored(steps.StepState(), steps.Version(1, 0, 0, "initial"), {})
    state, _ = steps.begin(state, steps.Begin(0, 1, 1, 2))
    learner = Learner(
        config,
        build_algorithm(config.algorithm),
        1,
        shared=config.trainer.shared_prefix,
        run_round=lambda work: backend.micro(work[0]).finite,
    )
    for groups in arrivals:
        state = learner.learn(state, groups)
    return backend.reduced_gradient(float(steps.totals(state).tokens))


def _group(prompt: int, size: int, longest: int, vocabulary: int) -> Group:
    rng = random.Random(prompt)
    given = [rng.randrange(3, vocabulary) for _ in range(PROMPT_TOKENS)]
    members = tuple(_member(rng, sample, given, longest, vocabulary) for sample in range(size))
    keys = [(prompt, member.sample_index, member.attempt, member.body_digest) for member in members]
    return Group(prompt, members, set_digest(keys))


def _member(rng: random.Random, sample: int, given: list[int], longest: int, vocabulary: int) -> Member:
    answer = [rng.randrange(3, vocabulary) for _ in range(rng.randint(8, longest))]
    return Member(
        sample_index=sample,
        attempt=1,
        body_digest=f"answer-{sample}",
        reward=rng.random(),
        tokens=given + answer,
        trained=list(range(len(given), len(given) + len(answer))),
        engine_log_probs=[rng.uniform(-5, -3) for _ in answer],
        versions=[1] * len(answer),
    )

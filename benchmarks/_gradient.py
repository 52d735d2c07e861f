"""Gradients of given groups through the trainer's own learner and backend, without a service."""

from __future__ import annotations

import math
import random
from pathlib import Path
from typing import Any

import torch
from headrace_schema.openings import TrainerConfig
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.weights.bases import Bases
from headrace_trainer.backends.fsdp.backend import FsdpBackend
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning import step as steps
from headrace_trainer.learning.learner import Learner
from headrace_trainer.learning.samples import Group, Sample, Trajectory
from headrace_trainer.ranks.policy_rounds import PolicyRounds
from headrace_trainer.ranks.rank import Rank
from headrace_trainer.ranks.rounds import Rounds
from torch import Tensor

PROMPT_TOKENS = 12


class Accumulation:
    """One step attempt after the other on the model's initial weights: groups in, the step's gradient out."""

    def __init__(
        self,
        model: Path,
        dtype: str,
        trainer_group: TrainerGroup,
        group_size: int,
        *,
        groups: int = 1,
        shared: bool | None = True,
        lora: dict[str, Any] | None = None,
        backend_options: dict[str, Any] | None = None,
        bases: Bases | None = None,
    ) -> None:
        self._config = TrainerConfig.model_validate(
            {
                "model": {"path": str(model), "dtype": dtype},
                "algorithm": {"group_size": group_size, "prompts_per_step": groups},
                "trainer": {
                    "shared_prefix": shared,
                    "lora": lora,
                    "backend_options": backend_options or {},
                },
            }
        )
        self._rank = Rank(self._config, trainer_group, bases=bases)
        self._state = steps.StepState()
        self.rounds = rounds = Rounds(self._rank, holds_lease=lambda: True, deadlines=False)
        rounds.restore("", 1, None)
        self._learner = Learner(self._config, self._rank.algorithms[""], PolicyRounds(rounds))
        self._open()

    def learn(self, groups: list[Group]) -> None:
        """Advantages, packing, forward, loss and backward."""
        self._state = self._learner.learn(self._state, groups)

    def gradient(self) -> dict[str, Tensor]:
        """The pre-clip gradient of what was learned since the last call, by weight."""
        assert isinstance(self._rank.backend, FsdpBackend)
        found = self._rank.backend.reduced_gradient(float(steps.totals(self._state).tokens))
        self._open()
        return found

    def step(self, groups: list[Group]) -> None:
        """A whole step: gradient, optimizer, and the new version's weights cast as for publication."""
        self.learn(groups)
        tokens = float(steps.totals(self._state).tokens)
        assert self._rank.backend.commit(tokens, 1e-5).finite
        types = {name: getattr(torch, dtype) for name, dtype, _ in self._rank.backend.weight_layout()}
        for name, tensor in self._rank.backend.weights():
            tensor.to(types[name])
        self._open()

    def _open(self) -> None:
        state = steps.restored(steps.StepState(), steps.Version(1, 0, 0, "initial"), {})
        self._state, _ = steps.begin(state, steps.Begin(0, 1, 1, 2))


def gradient_difference(
    model: Path, vocabulary: int, dtype: str, *, groups: int, size: int, longest: int
) -> float:
    """Relative L2 distance of the pre-clip gradients, groups one at a time in order of length against all at once."""
    made = [synthetic_group(prompt, size, (8, longest), vocabulary) for prompt in range(groups)]
    arrival = sorted(made, key=lambda group: max(member.sampled for member in group.members))
    trainer_group = join_trainer_group(1, 0, 1, "", 30.0, torch.device("cpu"))
    try:
        accumulation = Accumulation(model, dtype, trainer_group, size, groups=groups)
        accumulation.learn(made)
        batch = accumulation.gradient()
        for group in arrival:
            accumulation.learn([group])
        return relative_l2(accumulation.gradient(), batch)
    finally:
        trainer_group.leave()


def relative_l2(one: dict[str, Tensor], other: dict[str, Tensor]) -> float:
    """Distance of two gradients by name, relative to the second."""
    difference = sum(float((one[name] - other[name]).double().square().sum()) for name in other)
    return math.sqrt(difference / sum(float(value.double().square().sum()) for value in other.values()))


def synthetic_group(
    prompt: int, size: int, lengths: tuple[int, int], vocabulary: int, *, given: int = PROMPT_TOKENS
) -> Group:
    """Random tokens, the same for the same prompt ordinal; answers of `lengths` (shortest, longest) tokens."""
    rng = random.Random(prompt)
    prompt_ids = [rng.randrange(3, vocabulary) for _ in range(given)]
    members = tuple(_member(rng, sample, prompt_ids, lengths, vocabulary) for sample in range(size))
    keys = [(prompt, member.sample_index, member.attempt, member.body_digest) for member in members]
    return Group(prompt, members, set_digest(keys))


def _member(
    rng: random.Random, sample: int, given: list[int], lengths: tuple[int, int], vocabulary: int
) -> Trajectory:
    answer = [rng.randrange(3, vocabulary) for _ in range(rng.randint(*lengths))]
    return Trajectory(
        sample_index=sample,
        attempt=1,
        body_digest=f"answer-{sample}",
        reward=rng.random(),
        samples=(
            Sample(
                given + answer,
                trained=list(range(len(given), len(given) + len(answer))),
                engine_log_probs=[rng.uniform(-5, -3) for _ in answer],
                versions=[1] * len(answer),
            ),
        ),
    )

"""A large robot policy: divided over the ranks by fully_shard, in the layouts that language models have."""

from __future__ import annotations

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from headrace_modelkit.lora import compute_merged
from headrace_modelkit.products import use_fp32_products
from headrace_modelkit.tensor_files import Tensors
from headrace_trainer.backends._base import ReferenceFacts, StateReader
from headrace_trainer.backends.fsdp.gathering import Root
from headrace_trainer.backends.fsdp.sharded import ShardedBackend, float_what_learns
from headrace_trainer.backends.fsdp.sharding import ShardedModel
from headrace_trainer.backends.shared.distributing import open_alike, types_of, weights_digest
from headrace_trainer.backends.shared.fit import check_weights
from headrace_trainer.learning.samples import LentPictures
from torch import Tensor
from torch.utils.checkpoint import checkpoint
from typing_extensions import override

from headrace_robots.policies.directory import (
    empty_policy,
    layers_of_policy,
    learning_policy,
    open_policy,
)
from headrace_robots.policies.policy import ACTIONS, Evaluation, Observation
from headrace_robots.trainer.backend.backend import CRITIC, RobotBackend
from headrace_robots.trainer.backend.episodes import Chunks
from headrace_robots.trainer.sizes import robot_sizes

if TYPE_CHECKING:
    from headrace_robots.policies.policy import RobotPolicy


@dataclass(frozen=True)
class Drawn:
    """Chunks that were drawn, to be scored."""

    observation: Observation
    sampled: Mapping[str, Tensor]


@dataclass(frozen=True)
class Shown:
    """Actions of demonstrations, to be imitated; as `RobotPolicy.imitate` takes them."""

    observation: Observation
    actions_BHA: Tensor
    seeds: Many[int]


class RobotRoot(Root):
    """A robot policy. fully_shard hangs on a module's forward, and knows tensors only where they lie in a tuple."""

    def __init__(self, policy: RobotPolicy) -> None:
        super().__init__()
        self.model, self.critic = policy, None

    def forward(self, asked: Drawn | Shown | None, anchor: Tensor) -> tuple[Tensor, ...]:
        """(log-probs, entropies, values) of chunks that were drawn; the losses of those that were shown."""
        if asked is None:
            return (anchor * 1.0,)
        if isinstance(asked, Shown):
            losses_BH: Tensor = self.model.imitate(asked.observation, asked.actions_BHA, asked.seeds)
            return (losses_BH.clone(),)
        found = self.model.evaluate(asked.observation, asked.sampled)
        # No views: fully_shard's hook on one is lost where it is written to.
        return found.log_probs_BCA.clone(), found.entropy_BCA.clone(), found.values_B.clone()


class ShardedRobot(RobotBackend, ShardedBackend):
    """One rank of a policy that the ranks divide."""

    _measure = staticmethod(robot_sizes)

    # Passes

    @override
    def learn(self, chunks: list[int], lent: LentPictures) -> bool:
        self._dirty = True
        return super().learn(chunks, lent)

    @override
    def _evaluate(self, taken: Chunks) -> Evaluation:
        return Evaluation(*self._pass(Drawn(taken.observation, taken.sampled)))

    @override
    def _imitation_losses(self, taken: Chunks, seeds: Many[int]) -> Tensor:
        self._dirty = torch.is_grad_enabled() or self._dirty
        return self._pass(Shown(taken.observation, taken.sampled[ACTIONS], seeds))[0]

    def _pass(self, asked: Drawn | Shown) -> tuple[Tensor, ...]:
        found: tuple[Tensor, ...] = self._sharded.policy(asked, torch.zeros((), device=self._ranks.device))
        return found

    @override
    def _missing(self, passes: int) -> int:
        return int(self._ranks.maximum({"passes": float(passes)})["passes"]) - passes

    @property
    @override
    def _policy(self) -> RobotPolicy:
        policy: RobotPolicy = self._sharded.model
        return policy

    @property
    @override
    def _critic_names(self) -> frozenset[str]:
        return frozenset(name for name in self._sharded.learned if name.startswith(CRITIC))

    # State

    @override
    def check_files(self, *, initial: bool) -> None:
        if self._config.model.path and (initial or self._lora):
            open_policy(self._config.model, self._config.seed)

    @override
    def load_initial(self) -> None:
        _ = self.layout  # refuses what does not fit before anything is read
        self._read_and_shard()
        self._begin()

    @override
    def check_state(self, reader: StateReader) -> None:
        config = self._config
        key, name = (
            ("model.path", repr(config.model.path)) if config.model.path else ("model.policy", "the policy")
        )
        check_weights(reader, self._empty(), config.trainer.lora, name, key)

    @override
    def load_state(self, reader: StateReader | None) -> None:
        _ = self.layout
        if self._lora:
            self._read_and_shard()
            self._fill(self._sharded.adapter_names, reader.adapter if reader else None)
            whole = [name for name in self._sharded.weight_names if name in self._sharded.learned]
            self._fill(whole, reader.weight if reader else None)
        else:
            self._shard(self._empty())
            self._fill(self._sharded.weight_names, reader.weight if reader else None)
        self._fill_moments(reader)

    @override
    def adapter_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """Heads may learn whole, and what was seen is counted: its versions are whole."""
        return []

    @override
    def _warmed_up(self) -> None:
        self._optimizer = self._new_optimizer()

    def _read_and_shard(self) -> None:
        section = self._config.model
        empty = empty_policy(section)
        source = open_alike(self._ranks, section, lambda: open_policy(section, self._config.seed))
        self._base_facts = self._facts_of(source, empty)
        self._shard(self._empty())
        self._fill_weights(source, types_of(empty))

    def _facts_of(
        self, source: Tensors | None, empty: RobotPolicy
    ) -> tuple[ReferenceFacts, ReferenceFacts] | None:
        if not self._lora or not self._ranks.leads or source is None:
            return None
        facts = ReferenceFacts(self._config.model.path, weights_digest(source, empty).hexdigest())
        return facts, facts

    def _empty(self) -> RobotPolicy:
        trainer = self._config.trainer
        policy = learning_policy(self._config.model, trainer.freeze or [], trainer.lora, self._config.seed)
        if self._config.deterministic:  # simulators' engines merge
            compute_merged(policy)
        return policy

    def _shard(self, policy: RobotPolicy) -> None:
        float_what_learns(policy)
        use_fp32_products(policy, self._ranks.device)
        layers = layers_of_policy(policy)
        if self.layout.checkpointing:
            for layer in layers:
                plain: Any = layer.forward
                layer.forward = partial(  # type: ignore[method-assign]
                    checkpoint, plain, use_reentrant=False, preserve_rng_state=False
                )
        self._model = ShardedModel(
            RobotRoot(policy),
            layers,
            self._ranks,
            None if self._lora else self._dtype,
            layout=self.layout,
        )
        self._optimizer = self._new_optimizer()
        self._dirty = False

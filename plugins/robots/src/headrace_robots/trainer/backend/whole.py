"""A small robot policy: all of it on each rank in fp32, its gradient added up over the ranks."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from headrace_modelkit.tensor_files import whole
from headrace_modelkit.weights import load_weights, state_tensors, weight_layout
from headrace_schema.openings import TrainerConfig
from headrace_trainer.backends._base import Owners, StatePart, StateReader
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.fit import check_state_shapes
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.memory import MemoryPlan, Rooms
from torch import Tensor, nn
from typing_extensions import override

from headrace_robots.policies.directory import initial_policy, policy_of
from headrace_robots.policies.policy import ACTIONS, Evaluation
from headrace_robots.trainer.algorithms._base import EpisodeAlgorithm
from headrace_robots.trainer.backend.backend import CRITIC, RobotBackend
from headrace_robots.trainer.backend.episodes import Chunks

if TYPE_CHECKING:
    from headrace_robots.policies.policy import RobotPolicy

FP32 = 4
STATE = {"masters": 1, "moments": 2, "gradients": 2}
"""How often a rank has all weights in fp32."""


class WholeRobot(RobotBackend):
    """A whole policy on each rank."""

    def __init__(self, config: TrainerConfig, algorithm: EpisodeAlgorithm, ranks: TrainerGroup) -> None:
        super().__init__(config, algorithm, ranks)
        self._loaded: RobotPolicy | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        """Those of the loaded policy by name: to walk its modules for them takes as long as a small policy's pass."""
        self._optimizer: ShardedAdamW | None = None

    @override
    def _evaluate(self, taken: Chunks) -> Evaluation:
        return self._policy.evaluate(taken.observation, taken.sampled)

    @override
    def _imitation_losses(self, taken: Chunks, seeds: Many[int]) -> Tensor:
        return self._policy.imitate(taken.observation, taken.sampled[ACTIONS], seeds)

    @override
    def _missing(self, passes: int) -> int:
        return 0

    @override
    def _warmed_up(self) -> None:
        self._take(self._policy)

    # The optimizer step

    @override
    def zero(self) -> None:
        self._drop_gradients()
        self._figures = TokenFigures()

    @override
    def gradient_is_finite(self) -> bool:
        return math.isfinite(self._global_norm(self._gradients()))

    @override
    def _reduced(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        gradients = self._gradients()
        return gradients, frozenset(name for name in gradients if name.startswith(CRITIC))

    @override
    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        """Every rank has the whole gradient."""
        norms = torch._foreach_norm(list(gradients.values()))
        return float(torch.stack(norms).double().square().sum().sqrt()) if norms else 0.0

    @override
    def _drop_gradients(self) -> None:
        for parameter in self._parameters.values():
            parameter.grad = None

    @override
    def _kept(self) -> dict[str, Tensor]:
        return dict(state_tensors(self._policy))

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        found = {name: gradient / denominator for name, gradient in self._gradients().items()}
        self.zero()
        return found

    def _gradients(self) -> dict[str, Tensor]:
        """Those of all ranks, added up; this rank's own stay as they are, and are given where there is no other."""
        alone = self._ranks.world_size == 1
        found = {
            name: torch.zeros_like(parameter.data)
            if parameter.grad is None
            else (parameter.grad if alone else parameter.grad.clone())
            for name, parameter in self._parameters.items()
        }
        if not alone:
            for gradient in found.values():
                dist.all_reduce(gradient)
        return found

    # State

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        with torch.device("meta"):
            config = policy_of(self._config.model)
            assert config is not None
            weights = sum(parameter.numel() for parameter in config.build(0).parameters())
        state = {name: copies * weights * FP32 for name, copies in STATE.items()}
        hold = {"hold": 3 * weights * FP32 if self._algorithm.passes.several else 0}
        on_cpu = self._ranks.device.type == "cpu"
        host, device = (state | hold, {}) if on_cpu else (hold, state)
        return MemoryPlan(host, device, would_fit=None)  # each rank has all of it

    @override
    def check_files(self, *, initial: bool) -> None:
        """A policy is built here, or read whole."""

    @override
    def load_initial(self) -> None:
        self._take(initial_policy(self._config.model, self._config.seed))
        self._begin()

    @override
    def check_state(self, reader: StateReader) -> None:
        own = {name: tuple(value.shape) for name, value in state_tensors(self._fresh())}
        section = self._config.model
        key, name = ("model.path", repr(section.path)) if section.path else ("model.policy", "the policy")
        check_state_shapes(reader, own, name, key)

    @override
    def load_state(self, reader: StateReader | None) -> None:
        policy = self._fresh()
        if reader is not None:
            load_weights(policy, {name: reader.weight(name) for name, _ in state_tensors(policy)})
        self._take(policy)
        steps = self._saved_steps(reader)
        if not steps:
            return
        moments: dict[str, dict[str, Tensor]] = {}
        for kind in MOMENTS:
            moments[kind] = {}
            for name, shard in self._shards().items():
                moment = torch.empty_like(shard) if reader is None else reader.moment(kind, name).to(shard)
                self._ranks.share(moment)
                moments[kind][name] = moment
        self._adamw.load(moments, steps)

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        layout = weight_layout(self._policy, torch.float32)
        return [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in layout]

    @override
    def weights(
        self, *, published: bool = False, owners: Owners | None = None
    ) -> Iterator[tuple[str, Tensor]]:
        rank = self._ranks.rank
        for name, tensor in state_tensors(self._policy):
            if owners is None or owners[name] == rank:
                yield name, tensor.detach().cpu()

    @override
    def weight_parts(self) -> Iterator[StatePart]:
        return self._parts_of((name, tensor.detach()) for name, tensor in state_tensors(self._policy))

    @override
    def moment_parts(self) -> Iterator[StatePart]:
        return self._parts_of(
            (f"{kind}/{name}", self._adamw.moment(kind, name)) for kind in MOMENTS for name in self._shards()
        )

    def _parts_of(self, tensors: Iterator[tuple[str, Tensor]]) -> Iterator[StatePart]:
        """Every rank has all of them: they take turns."""
        for index, (name, tensor) in enumerate(tensors):
            if index % self._ranks.world_size == self._ranks.rank:
                shape = tuple(tensor.shape)
                yield StatePart(name, shape, whole(shape), tensor)

    # The device

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        untyped: Any = self._policy
        untyped._apply(move)
        self._adamw.move(move, self._shards())

    # Parts

    def _fresh(self) -> RobotPolicy:
        config = policy_of(self._config.model)
        assert config is not None
        return config.build(self._config.seed)

    def _take(self, policy: RobotPolicy) -> None:
        self._loaded = policy.to(self._ranks.device)
        self._parameters = dict(policy.named_parameters())
        for _, tensor in state_tensors(policy):
            self._ranks.share(tensor.data)
        self._optimizer = self._optimizer_of(policy)

    def _optimizer_of(self, policy: RobotPolicy) -> ShardedAdamW:
        """One without state."""
        own = dict(policy.named_parameters())
        decays = {name for name, parameter in own.items() if parameter.dim() > 1}
        critic = frozenset(name for name in own if name.startswith(CRITIC))
        shards = {name: parameter.data for name, parameter in own.items()}
        return ShardedAdamW(self._config.optimizer, shards, decays=decays, critic=critic)

    @override
    def _shards(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._parameters.items()}

    @property
    def _policy(self) -> RobotPolicy:
        if self._loaded is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._loaded

    @property
    @override
    def _adamw(self) -> ShardedAdamW:
        if self._optimizer is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._optimizer

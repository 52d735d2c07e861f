"""One rank of a model trained with FSDP2: forward, backward, optimizer, state. Knows no steps and no wire.

Gradients of micro-batches are added up unnormalised in fp32 and divided by the step's denominator when it is
known, so the order and the packing in which groups come do not matter.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import Any

import torch
from headrace_modelkit.critic import Critic, critic_section, hidden_size, load_critic
from headrace_modelkit.devices import used_bytes
from headrace_modelkit.loading import DTYPES, load_architecture, load_model
from headrace_modelkit.weights import load_weights, state_tensors
from headrace_schema.openings import TrainerConfig
from headrace_schema.sections.learning import OptimizerSection
from torch import Tensor, nn
from transformers import PreTrainedModel

from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    RETURNS,
    VALUES,
    Algorithm,
    TokenBatch,
)
from headrace_trainer.allocator import give_back_if_short
from headrace_trainer.backends._base import (
    CRITIC_KIND,
    CommitReport,
    MicroReport,
    PrivateGradient,
    ReferenceFacts,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.fsdp.figures import TokenFigures
from headrace_trainer.backends.fsdp.fit import check_fit
from headrace_trainer.backends.fsdp.optimizer import MOMENTS, AdamWState, ShardedAdamW
from headrace_trainer.backends.fsdp.planned import plan_memory
from headrace_trainer.backends.fsdp.prefixes import attends_along_paths, shares_prefixes
from headrace_trainer.backends.fsdp.reference import Reference
from headrace_trainer.backends.fsdp.sharding import CRITIC, ShardedModel
from headrace_trainer.backends.fsdp.warmup import SupervisedBatches
from headrace_trainer.backends.plugins import FsdpOptions
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import Gang
from headrace_trainer.learning.packing.packing import MicroBatch, pack
from headrace_trainer.learning.samples import Columns, Rows, Sequence
from headrace_trainer.memory import MemoryPlan

Forward = tuple[Tensor, Tensor, Tensor | None]
"""Log-probs, entropies and values of the trained tokens."""
LossOf = Callable[[Forward, MicroBatch], Tensor]


class FsdpBackend:
    """See `Backend`."""

    def __init__(
        self, config: TrainerConfig, algorithm: Algorithm, gang: Gang, options: FsdpOptions | None = None
    ) -> None:
        self._config = config
        self._options = options or FsdpOptions()
        self._algorithm = algorithm
        self._gang = gang
        # A rank without work still takes part in every collective of the round.
        nothing = {name: [0.0] for name in (*algorithm.columns, RETURNS)}
        self._dummy: Rows = [[Sequence([0, 0], [1], [math.nan], columns=nothing)]]
        self._dtype = DTYPES[config.model.dtype]
        self._figures = TokenFigures()
        self._dirty = False
        self._policy_shares_prefixes = self._policy_along_paths = False
        self._reference: Reference | None = None
        self._model: ShardedModel | None = None
        self._optimizer: ShardedAdamW | None = None
        self._held: tuple[dict[str, Tensor], AdamWState] | None = None
        self._contributed: dict[str, Tensor] = {}
        """Shards of what helpers have added to the step's gradient."""
        torch.use_deterministic_algorithms(config.deterministic)

    @property
    def shares_prefixes(self) -> bool:
        """See `Backend`: both models must follow a tree's mask."""
        return self._policy_shares_prefixes and (self._reference is None or self._reference.shares_prefixes)

    def memory_plan(self) -> MemoryPlan:
        """See `Backend`."""
        return plan_memory(
            self._config,
            self._algorithm,
            self._gang.world_size,
            reshard=self._options.reshard_micro_batches,
            on_gpu=self._gang.device.type != "cpu",
        )

    def load_initial(self) -> None:
        """See `Backend`."""
        leads = self._gang.leads
        self._shard(load_model(self._config.model, weights=leads), self._load_critic(weights=leads))

    def check_state(self, reader: StateReader) -> None:
        """See `Backend`."""
        check_fit(reader, self._config.model, self._load_critic(weights=False))

    def load_state(self, reader: StateReader | None) -> None:
        """See `Backend`."""
        model = load_model(self._config.model, weights=False, dtype=torch.float32)
        if reader is not None:
            load_weights(model, {name: reader.weight(name) for name, _ in state_tensors(model)})
        critic = self._load_critic(weights=False, dtype=torch.float32)
        if reader is not None and critic is not None:
            for name, tensor in critic.tensors():
                tensor.data.copy_(reader.critic_weight(f"{CRITIC}{name}"))
        self._shard(model, critic)
        steps = int(self._gang.sum({"steps": float(reader.optimizer_steps if reader else 0)})["steps"])
        if steps:
            moments = {
                kind: {
                    name: self._sharded.scatter(name, reader.moment(kind, name) if reader else None)
                    for name in self._sharded.parameters
                }
                for kind in MOMENTS
            }
            self._adamw.load(moments, steps)

    def warm_up(self) -> WarmUp:
        """See `Backend`."""
        warmup = self._config.trainer.warmup
        batches = SupervisedBatches(self._config, self._gang.rank, self._gang.world_size)
        optimizer = self._new_optimizer()
        for step in range(warmup.steps):
            work, tokens = batches.step(step, shared=self.shares_prefixes)
            rounds = int(self._gang.maximum({"rounds": float(len(work))})["rounds"])
            for index in range(rounds):
                rows = work[index] if index < len(work) else []
                self._backward(rows, _supervised)
            self._apply(optimizer, self._gang.sum({"tokens": float(tokens)})["tokens"], warmup.lr)
        self.zero()
        self._same_as_policy()
        return WarmUp(warmup.steps)

    def _same_as_policy(self) -> None:
        """A critic that begins as the policy does begins as the warmed-up one."""
        plan = self._algorithm.critic
        if plan is None or not plan.own_model or plan.path is not None:
            return
        shards = self._sharded.shards()
        policy = {name.removeprefix(self._sharded.body_prefix): shard for name, shard in shards.items()}
        for name in self._sharded.critic_names:
            if name.startswith(f"{CRITIC}body."):
                shards[name].copy_(policy[name.removeprefix(f"{CRITIC}body.")])
        self._sharded.release()

    def load_reference(self) -> None:
        """See `Backend`."""
        if REFERENCE_LOG_PROBS not in self._algorithm.columns:
            return
        warmed = None
        if self._config.trainer.reference is None and self._config.trainer.warmup.steps:
            if self._model is None:  # A checkpoint is about to be loaded: the warm-up is made again.
                torch.manual_seed(self._config.seed)
                self.load_initial()
                self.warm_up()
            warmed = dict(self._sharded.weights())
        self._reference = Reference(self._config, self._gang, warmed)

    @property
    def reference(self) -> ReferenceFacts | None:
        """See `Backend`."""
        return self._reference.facts if self._reference is not None else None

    @property
    def reference_bytes(self) -> int:
        """See `Backend`."""
        return self._reference.size_bytes if self._reference is not None else 0

    def zero(self) -> None:
        """See `Backend`."""
        if self._dirty:
            self._sharded.finish_backward()
        self._sharded.drop_gradients()
        self._figures = TokenFigures()
        self._contributed = {}
        self._dirty = False

    def micro(self, rows: Rows) -> MicroReport:
        """See `Backend`."""
        found = TokenFigures()

        def loss_of(found_K: Forward, batch: MicroBatch) -> Tensor:
            tokens = _tokens(found_K, batch)
            sums = self._algorithm.loss(tokens)
            found.add(sums, tokens)
            return sums.loss

        entropy_K = self._backward(rows, loss_of, values=self._algorithm.critic is not None)
        if entropy_K is None:
            return MicroReport(finite=False)
        if rows:
            found.add_entropy(entropy_K)
            self._figures.merge(found)
        return MicroReport(finite=True)

    def gradient_is_finite(self) -> bool:
        """See `Backend`."""
        if self._dirty:
            self._sharded.finish_backward()
            self._dirty = False
        return math.isfinite(self._global_norm(self._sharded.gradients()))

    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        """See `Backend`."""
        batch = self._pack(rows or self._dummy)
        found: list[Columns] = [{} for row in rows for _ in row]
        for name, computed_K in self._columns(columns, batch).items():
            values = iter(computed_K.tolist())
            for own, sequence in zip(found, (s for row in rows for s in row), strict=True):
                own[name] = [next(values) for _ in sequence.trained]
        return found

    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        """See `Backend`."""
        norm, critic_norm = self._apply(self._adamw, denominator, learning_rate, critic_rate)
        sums = self._gang.sum(self._figures.sums())
        maxima = self._gang.maximum(self._figures.maxima())
        self._figures = TokenFigures()
        finite = math.isfinite(norm + critic_norm)
        return CommitReport(finite, norm, sums, maxima, critic_norm)

    def hold(self) -> None:
        """See `Backend`."""
        weights = {name: shard.to("cpu", copy=True) for name, shard in self._sharded.shards().items()}
        self._held = weights, self._adamw.copy()

    def end_hold(self, *, back: bool) -> None:
        """See `Backend`."""
        held, self._held = self._held, None
        if not back:
            return
        self.zero()
        if held is not None:
            weights, state = held
            for name, shard in self._sharded.shards().items():
                shard.copy_(weights[name])
            self._adamw.put_back(state)
            self._sharded.release()  # whole parameters of an earlier forward are of other weights

    def reduced_gradient(self, denominator: float) -> dict[str, Tensor]:
        """The step's whole gradient before clipping, by weight; consumes the accumulators. For tests and figures."""
        self._sharded.finish_backward()
        shards = self._all_gradients()
        whole = {name: self._sharded.gather(name, shard) / denominator for name, shard in shards.items()}
        self._dirty = False
        self.zero()
        return whole

    def load_base(self, reader: StateReader) -> None:
        """See `HelpingBackend`."""
        if self._model is None:
            self.load_state(reader)
            return
        self.zero()
        for name, shard in self._sharded.shards().items():
            shard.copy_(self._sharded.scatter(name, reader.weight(name)))
        for name, buffer in self._sharded.buffers.items():
            buffer.copy_(reader.weight(name))
        self._sharded.release()

    def gradient_shapes(self) -> dict[str, tuple[int, ...]]:
        """See `HelpingBackend`."""
        return {name: tuple(parameter.shape) for name, parameter in self._sharded.parameters.items()}

    def private_gradient(self) -> PrivateGradient:
        """See `HelpingBackend`."""
        if self._dirty:
            self._sharded.finish_backward()
            self._dirty = False
        shards = self._sharded.gradients()
        whole = {name: self._sharded.gather(name, shard) for name, shard in shards.items()}
        return PrivateGradient(whole, self._figures.sums(), self._figures.maxima())

    def add_gradient(self, given: PrivateGradient | None) -> None:
        """See `HelpingBackend`."""
        for name in self._sharded.parameters:
            shard = self._sharded.scatter(name, given.tensors[name] if given else None)
            own = self._contributed.get(name)
            self._contributed[name] = shard if own is None else own.add_(shard)
        if given is not None:
            self._figures.merge(TokenFigures.of(given.token_sums, given.token_maxima))

    def _all_gradients(self) -> dict[str, Tensor]:
        """The reduced shards with what helpers have added, which is then part of them and of nothing else."""
        gradients = self._sharded.gradients()
        for name, shard in self._contributed.items():
            gradients[name].add_(shard)
        self._contributed = {}
        return gradients

    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        """See `Backend`."""
        parameters, buffers = self._sharded.parameters, self._sharded.buffers
        layout = []
        for name in self._sharded.weight_names:
            value, dtype = (
                (parameters[name], self._dtype)
                if name in parameters
                else (buffers[name], buffers[name].dtype)
            )
            layout.append((name, str(dtype).removeprefix("torch."), tuple(value.shape)))
        return layout

    def weights(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        return self._sharded.weights()

    def moments(self) -> Iterator[tuple[str, Tensor]]:
        """See `Backend`."""
        shards = self._sharded.shards()
        for kind in MOMENTS:
            for name, shard in shards.items():
                own = self._adamw.moment(kind, name) if shard.numel() else shard
                yield f"{kind}/{name}", self._sharded.gather(name, own)
        for name, tensor in self._sharded.critic_weights():
            yield f"{CRITIC_KIND}/{name}", tensor

    @property
    def optimizer_steps(self) -> int:
        """See `Backend`."""
        return self._adamw.steps

    def suspend(self) -> int:
        """See `Backend`. Everything goes to host memory; on the host, what can be made again is dropped."""
        device = self._gang.device
        if device.type == "cpu":
            self._sharded.release()
            return give_back_if_short()
        before = used_bytes(device)
        self._park()
        self.move(lambda tensor: tensor.to("cpu"))
        torch.cuda.empty_cache()
        return before - used_bytes(device)

    def wake(self) -> None:
        """See `Backend`."""
        device = self._gang.device
        if device.type != "cpu":
            self.move(lambda tensor: tensor.to(device))

    def release(self) -> None:
        """See `Backend`."""
        self._sharded.release()

    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes masters, gradients and moments elsewhere; nothing runs until they are back on the device."""
        self._sharded.move(move)
        self._contributed = {name: move(shard) for name, shard in self._contributed.items()}
        self._adamw.move(move, self._sharded.shards())

    def _load_critic(self, *, weights: bool, dtype: torch.dtype | None = None) -> Critic | None:
        plan = self._algorithm.critic
        if plan is None:
            return None
        if not plan.own_model:
            return Critic(hidden_size(load_architecture(self._config.model)))
        return load_critic(critic_section(self._config.model, plan.path), weights=weights, dtype=dtype)

    def _shard(self, model: PreTrainedModel, critic: Critic | None) -> None:
        # Master weights start from the values that the engine computes with, not from finer ones.
        bodies = [model] if critic is None or critic.body is None else [model, critic.body]
        for module in [model, critic] if critic else [model]:
            _float(module)
        for _, tensor in [*state_tensors(model), *(critic.tensors() if critic else ())]:
            self._gang.share(tensor.data)
        if self._config.trainer.gradient_checkpointing:
            for body in bodies:
                untyped: Any = body
                untyped.gradient_checkpointing_enable({"use_reentrant": False})
                body.train()  # transformers checkpoints in training mode only; modelkit has turned dropout off
        self._policy_shares_prefixes = shares_prefixes(self._config, [body.config for body in bodies])
        self._policy_along_paths = attends_along_paths(self._config, bodies, self._gang.device)
        self._model = ShardedModel(
            model, self._gang, self._dtype, reshard=self._options.reshard_micro_batches, critic=critic
        )
        self._optimizer = self._new_optimizer()
        self._dirty = False

    def _new_optimizer(self) -> ShardedAdamW:
        decays = {name for name, p in self._sharded.parameters.items() if p.dim() > 1}
        config: OptimizerSection = self._config.optimizer
        critic = frozenset(self._sharded.critic_names)
        return ShardedAdamW(config, self._sharded.shards(), decays=decays, critic=critic)

    def _forward(self, batch: MicroBatch, *, values: bool) -> Forward:
        anchor = torch.zeros((), device=self._gang.device)
        found: Forward = self._sharded.policy(batch, self._temperature(), anchor, values=values)
        return found

    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> Tensor | None:
        """Accumulates the loss gradient; the tokens' entropies, or None when any rank is not finite."""
        self._park()
        batch = self._pack(rows or self._dummy)
        found_K = self._forward(batch, values=values)
        log_probs_K, entropy_K, _ = found_K
        loss = loss_of(found_K, batch)
        finite = bool(torch.isfinite(loss)) and bool(torch.isfinite(log_probs_K).all())
        if not self._gang.all_true(finite):
            return None
        self._dirty = True
        torch.autograd.backward(loss)
        detached: Tensor = entropy_K.detach()
        return detached

    def _apply(
        self, optimizer: ShardedAdamW, denominator: float, rate: float, critic_rate: float = 0.0
    ) -> tuple[float, float]:
        """Reduce, vote, clip and step; the global norms before clipping. One that is not finite changes nothing.

        The critic's own weights are clipped apart, so that a bad critic does not slow the policy.
        """
        if self._dirty:
            self._sharded.finish_backward()
        gradients = self._all_gradients()
        beside = {name: gradients[name] for name in self._sharded.critic_names if name in gradients}
        own = {name: gradient for name, gradient in gradients.items() if name not in beside}
        norm = self._global_norm(own) / denominator
        critic_norm = self._global_norm(beside) / denominator if beside else 0.0
        if math.isfinite(norm + critic_norm):
            clip, critic_clip = self._clip(norm), self._clip(critic_norm)
            for gradient in beside.values():
                gradient.mul_(critic_clip / clip)
            optimizer.step(gradients, denominator / clip, rate, critic_rate)
            # A forward without a backward leaves whole parameters behind, which the step has not moved.
            self._sharded.release()
        self._sharded.drop_gradients()
        self._dirty = False
        return norm, critic_norm

    def _clip(self, norm: float) -> float:
        return min(1.0, self._config.optimizer.grad_clip / (norm + 1e-6))

    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        norms = torch._foreach_norm(list(gradients.values()))
        own = torch.stack(norms).double().square().sum().item()
        return math.sqrt(self._gang.sum({"square": own})["square"])

    def _columns(self, names: Many[str], batch: MicroBatch) -> dict[str, Tensor]:
        """Columns of the infer pass, (K,)."""
        known = {OLD_LOG_PROBS, VALUES} if self._algorithm.critic else {OLD_LOG_PROBS}
        if REFERENCE_LOG_PROBS in names and self._reference is None:
            raise invalid("the run has no reference model: no option of its algorithm needs one")
        if VALUES in names and VALUES not in known:
            raise invalid("the run has no critic: its algorithm needs none")
        computed: dict[str, Tensor | None] = {}
        if known.intersection(names):
            with torch.no_grad():
                log_probs_K, _, values_K = self._forward(batch, values=VALUES in names)
            computed = {OLD_LOG_PROBS: log_probs_K, VALUES: values_K}
        if self._reference is not None and REFERENCE_LOG_PROBS in names:
            computed[REFERENCE_LOG_PROBS] = self._reference.log_probs(batch)
        return {name: found_K for name in names if (found_K := computed[name]) is not None}

    def _park(self) -> None:
        if self._reference is not None:
            self._reference.park()

    def _pack(self, rows: Rows) -> MicroBatch:
        by_paths = self._policy_along_paths and (self._reference is None or self._reference.along_paths)
        return pack(rows, shared=self.shares_prefixes, by_paths=by_paths).to(self._gang.device)

    def _temperature(self) -> float:
        return self._config.sampling.temperature

    @property
    def _sharded(self) -> ShardedModel:
        if self._model is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._model

    @property
    def _adamw(self) -> ShardedAdamW:
        if self._optimizer is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._optimizer


def _supervised(found_K: Forward, batch: MicroBatch) -> Tensor:
    return -(found_K[0] * batch.weights_K).sum()


def _tokens(found_K: Forward, batch: MicroBatch) -> TokenBatch:
    log_probs_K, entropy_K, values_K = found_K
    own_K = log_probs_K.detach()
    old_K = batch.columns_K.get(OLD_LOG_PROBS, torch.full_like(own_K, math.nan))
    return TokenBatch(
        log_probs_K=log_probs_K,
        old_log_probs_K=torch.where(old_K.isnan(), own_K, old_K),
        engine_log_probs_K=batch.engine_log_probs_K,
        advantages_K=batch.advantages_K,
        weights_K=batch.weights_K,
        sequences_K=batch.sequences_K,
        columns_K=batch.columns_K,
        entropy_K=entropy_K,
        values_K=values_K,
    )


def _float(module: nn.Module) -> None:
    for parameter in module.parameters():
        parameter.data = parameter.data.float()

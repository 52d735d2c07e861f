"""A model that learns, whatever divides it over the ranks: optimizer step, hold, moves; of language models, passes too.

A backend of its own kind adds its forward and backward, and where its shards are.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many

import msgspec
import torch
from headrace_modelkit.devices import used_bytes
from headrace_modelkit.families.drafts import DRAFT
from headrace_modelkit.families.mixtures import ExpertShape
from headrace_modelkit.families.routing import Counts, Routing
from headrace_modelkit.pinned import rooms_of
from headrace_schema.openings import TrainerConfig
from headrace_schema.progress import counter
from headrace_schema.sections.learning import OptimizerSection
from headrace_servicekit.memory.allocator import give_back_if_short
from torch import Tensor
from typing_extensions import override

from headrace_trainer.algorithms._base import (
    OLD_LOG_PROBS,
    REFERENCE_LOG_PROBS,
    Algorithm,
    balance_loss_of,
    bias_rate_of,
    replays_routing,
)
from headrace_trainer.backends._base import Backend, BalancingBackend, CommitReport, StateReader, WarmUp
from headrace_trainer.backends.shared.figures import TokenFigures, fix_sums
from headrace_trainer.backends.shared.losses import Forward, supervised, token_batch
from headrace_trainer.backends.shared.optimizer import AdamWState, ShardedAdamW
from headrace_trainer.backends.shared.warmup import SupervisedBatches
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.packing import MicroBatch
from headrace_trainer.learning.planning import Costs
from headrace_trainer.learning.samples import Columns, Rows

LossOf = Callable[[Forward, MicroBatch], Tensor]


class LearnedModel(Backend):
    """Gradients are added up unnormalised in fp32 and divided by the step's denominator at the commit, so the order and
    the packing in which groups come do not matter.
    """

    def __init__(self, config: TrainerConfig, algorithm: Algorithm, ranks: TrainerGroup) -> None:
        self._config = config
        self._algorithm = algorithm
        self._ranks = ranks
        self._figures = TokenFigures()
        self._held: tuple[dict[str, Tensor], AdamWState] | None = None
        fix_sums(config.deterministic)

    # What a backend adds

    @property
    @abstractmethod
    def _adamw(self) -> ShardedAdamW:
        """The optimizer. Raises Refusal NOT_OPEN before weights are loaded."""

    @abstractmethod
    def _shards(self) -> dict[str, Tensor]:
        """This rank's fp32 master shards; what is written to them is computed with after `_spread`."""

    def _kept(self) -> dict[str, Tensor]:
        """What `hold` keeps of the weights."""
        return self._shards()

    def _spread(self) -> None:
        """Makes the shards' values those of the next forward, on every rank."""

    @abstractmethod
    def _reduced(self) -> tuple[dict[str, Tensor], frozenset[str]]:
        """The reduced gradient's shards, and which of them are of the critic's own weights."""

    @abstractmethod
    def _global_norm(self, gradients: dict[str, Tensor]) -> float:
        """The norm of these shards over all ranks."""

    @abstractmethod
    def _drop_gradients(self) -> None:
        """Drops reduced gradients."""

    @abstractmethod
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        """Takes masters, gradients and moments elsewhere; nothing runs until they are back on the device."""

    def _park(self) -> None:
        """Takes to host memory what only some rounds compute with."""

    def _stepped(self) -> None:
        """After the optimizer has changed weights."""

    def _committed(self) -> None:
        """After a commit, whether or not it changed any."""

    # What all do

    @property
    @override
    def costs(self) -> Costs:
        return Costs()

    @property
    @override
    def optimizer_steps(self) -> int:
        return self._adamw.steps

    @override
    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        norm, critic_norm = self._apply(self._adamw, denominator, learning_rate, critic_rate)
        sums = self._ranks.sum(self._figures.sums())
        maxima = self._ranks.maximum(self._figures.maxima())
        self._figures = TokenFigures()
        self._committed()
        return CommitReport(math.isfinite(norm + critic_norm), norm, sums, maxima, critic_norm)

    def _apply(
        self, optimizer: ShardedAdamW, denominator: float, rate: float, critic_rate: float = 0.0
    ) -> tuple[float, float]:
        """Reduce, clip and step; the global norms before clipping. One that is not finite changes nothing.

        The critic's own weights are clipped apart, so that a bad critic does not slow the policy; so are those of a
        head that drafts, whose gradient is a mean over the tokens that it learns from, and 0 where it is not finite.
        """
        gradients, critic = self._reduced()
        parts: dict[str, dict[str, Tensor]] = {"": {}, "critic": {}, "draft": {}}
        for name, gradient in gradients.items():
            kind = "draft" if name.startswith(DRAFT) else "critic" if name in critic else ""
            parts[kind][name] = gradient
        counts = dict.fromkeys(parts, denominator)
        if parts["draft"]:
            own = {"tokens": self._figures.sums().get("draft_tokens", 0.0)}
            counts["draft"] = max(1.0, self._ranks.sum(own)["tokens"])
        norms = {
            kind: self._global_norm(part) / counts[kind] if part else 0.0 for kind, part in parts.items()
        }
        if math.isfinite(norms[""] + norms["critic"]):
            clip = self._clip(norms[""])
            for kind in ("critic", "draft"):
                factor = self._clip(norms[kind]) / clip * (denominator / counts[kind])
                for gradient in parts[kind].values():
                    gradient.mul_(factor) if math.isfinite(norms[kind]) else gradient.zero_()
            optimizer.step(gradients, denominator / clip, rate, critic_rate)
            self._stepped()
            self._spread()
        self._drop_gradients()
        return norms[""], norms["critic"]

    @override
    def use(self, optimizer: OptimizerSection) -> None:
        if optimizer != self._config.optimizer:
            self._config = self._config.model_copy(update={"optimizer": optimizer})
            self._adamw.use(optimizer)

    def _clip(self, norm: float) -> float:
        return min(1.0, self._config.optimizer.grad_clip / (norm + 1e-6))

    @override
    def hold(self) -> None:
        to_host = rooms_of(self._ranks.device).to_host
        weights = {name: to_host(tensor.detach()) for name, tensor in self._kept().items()}
        self._held = weights, self._adamw.copy(to_host)

    @override
    def end_hold(self, *, back: bool) -> None:
        held, self._held = self._held, None
        if not back:
            return
        self.zero()
        if held is not None:
            weights, state = held
            for name, tensor in self._kept().items():
                tensor.detach().copy_(weights[name])
            self._adamw.put_back(state)
            self._spread()

    def _saved_steps(self, reader: StateReader | None) -> int:
        """Optimizer steps of a checkpoint that rank 0 at least reads, on every rank."""
        own = {"steps": float(reader.optimizer_steps if reader else 0)}
        return int(self._ranks.maximum(own)["steps"])

    @override
    def suspend(self) -> int:
        """Everything goes to host memory, through pinned rooms; on the host, what can be made again is dropped."""
        device = self._ranks.device
        if device.type == "cpu":
            self.release()
            return give_back_if_short()
        before = used_bytes(device)
        self._park()
        self.move(rooms_of(device).to_host)
        torch.cuda.empty_cache()
        return before - used_bytes(device)

    @override
    def wake(self) -> None:
        device = self._ranks.device
        if device.type != "cpu":
            self.move(rooms_of(device).to_device)

    @override
    def release(self) -> None:
        """Nothing is gathered for a forward."""


class LanguageModel(LearnedModel, BalancingBackend):
    """A language model that learns from tokens, with its frozen reference where the algorithm needs one."""

    speaks = True
    """Whether this rank's figures count: one of the ranks that compute a replica between them does."""

    _routing: Routing | None = None
    """What the routers of the policy are told, where it has experts."""
    _expert_shape: ExpertShape | None = None
    _counts: Counts | None = None
    _loads: Counts | None = None
    """Of the minibatch, where biases follow them."""
    _compared: bool = False
    """Whether this step's first micro-batch was computed with the routers' own choice too."""

    counts_tokens = True
    """Whether this rank's counts of experts add to the others': of ranks that route the same tokens one does."""

    @abstractmethod
    def _backward(self, rows: Rows, loss_of: LossOf, *, values: bool = False) -> bool:
        """Accumulates the loss gradient, unless a loss or a log-prob is not finite on any rank."""

    @abstractmethod
    def _columns(self, names: Many[str], rows: Rows) -> dict[str, Tensor]:
        """Columns of the rows' trained tokens, (K,). Raises Refusal INVALID for one that the run has not."""

    @abstractmethod
    def _new_optimizer(self) -> ShardedAdamW:
        """An optimizer without state."""

    @property
    @abstractmethod
    def _has_weights(self) -> bool:
        """Whether weights are loaded."""

    @abstractmethod
    def _take_reference(self, *, warmed: bool) -> None:
        """Makes the reference; `warmed`: from the policy's weights, which a warm-up has changed."""

    def _warmed_up(self) -> None:
        """After a warm-up."""

    @override
    def _committed(self) -> None:
        self._compared = False
        self._loads = None
        if self._routing is not None:
            self._routing.balance_ME = None

    def _router_biases(self) -> dict[str, Tensor]:
        """Those by which routers choose, of the layers of experts in their order."""
        return {}

    @override
    def _stepped(self) -> None:
        if self._loads is not None:
            steps = self._loads.bias_steps(bias_rate_of(self._algorithm))
            for bias, step in zip(self._router_biases().values(), steps, strict=True):
                bias.add_(step.to(bias))

    @override
    def load_reference(self) -> None:
        if REFERENCE_LOG_PROBS not in self._algorithm.columns:
            return
        trainer = self._config.trainer
        warmed = trainer.reference is None and trainer.warmup.steps > 0
        if warmed and not self._has_weights:  # A checkpoint is about to be loaded: the warm-up is made again.
            torch.manual_seed(self._config.seed)
            self.load_initial()
            self.warm_up()
        self._take_reference(warmed=warmed)

    @override
    def warm_up(self) -> WarmUp:
        warmup = self._config.trainer.warmup
        batches = SupervisedBatches(self._config, self.replica, self.replicas)
        optimizer = self._new_optimizer()
        counter().begin(warmup.steps, "steps")
        for step in range(warmup.steps):
            work, tokens = batches.step(step, shared=self.shares_prefixes)
            rounds = int(self._ranks.maximum({"rounds": float(len(work))})["rounds"])
            for index in range(rounds):
                self._backward(work[index] if index < len(work) else [], supervised)
            own = float(tokens) if self.speaks else 0.0
            self._apply(optimizer, self._ranks.sum({"tokens": own})["tokens"], warmup.lr)
            counter().add()
        self.zero()
        self._warmed_up()
        return WarmUp(warmup.steps)

    @override
    def micro(self, rows: Rows, told: list[float] | None = None) -> bool:
        found = TokenFigures()

        def loss_of(forward: Forward, batch: MicroBatch) -> Tensor:
            tokens = token_batch(forward, batch)
            if told is not None:
                told.extend(forward[0].detach().tolist())
            sums = self._algorithm.loss(tokens)
            found.add(sums, tokens)
            found.add_entropy(forward[1].detach())
            if self._config.deterministic:
                found.compare_bits(tokens, rows)
            return sums.loss

        self._compare_routing(rows, found)
        if self._routing is not None:
            self._routing.changed = self._routing.forced = 0.0
        finite = self._backward(rows, loss_of, values=self._algorithm.critic is not None)
        if finite and rows and self.speaks:
            self._figures.merge(found)
        if (routing := self._routing) is not None and routing.forced_MNK is not None and self.counts_tokens:
            self._figures.reroute(float(routing.changed), float(routing.forced))
        return finite

    @override
    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        if self._config.deterministic:
            own = "".join(map(str, self._figures.differs)).encode()
            if differs := next(filter(None, self._ranks.gather(own)), b"").decode():
                self.zero()
                return CommitReport(False, 0.0, differs=differs)
        return super().commit(denominator, learning_rate, critic_rate)

    def _compare_routing(self, rows: Rows, figures: TokenFigures) -> None:
        """With routing replay, once a step and rank: how far the engine is off where routers choose themselves."""
        if self._routing is None or self._compared or not replays_routing(self._algorithm):
            return
        self._compared = True
        bare = [[msgspec.structs.replace(each, routes=b"") for each in row] for row in rows]
        own = self._columns([OLD_LOG_PROBS], bare).get(OLD_LOG_PROBS)
        if rows and own is not None:
            told = [value for row in rows for each in row for value in each.engine_log_probs]
            engine_K = torch.tensor(told)
            figures.compare_unforced(own.cpu() - engine_K)

    @override
    def count_experts(self, rows: Rows) -> None:
        routing, shape = self._routing, self._expert_shape
        assert routing is not None and shape is not None
        self._counts = routing.counts = self._counts or Counts.of(shape)
        try:
            self._columns([OLD_LOG_PROBS], rows)
        finally:
            routing.counts = None

    @override
    def balance_experts(self, denominator: float) -> None:
        routing, shape = self._routing, self._expert_shape
        assert routing is not None and shape is not None
        counts, self._counts = self._counts or Counts.of(shape), None
        packed = counts.packed() if self.counts_tokens else torch.zeros_like(counts.packed())
        parts = self._ranks.gather(packed.numpy().tobytes())
        counts.unpack(self._added([torch.frombuffer(bytearray(part), dtype=packed.dtype) for part in parts]))
        self._loads = counts if bias_rate_of(self._algorithm) else None
        if coefficient := balance_loss_of(self._algorithm):
            found = counts.balance_gradient(coefficient, shape.chosen, denominator * self._balance_share)
            routing.balance_ME = found.to(self._ranks.device)
        if self._ranks.leads:
            self._figures.balance(counts.loss(shape.chosen), counts.busiest())

    _balance_share = 1.0
    """Which part of the load-balance loss's gradient this rank adds, where others add it for the same tokens."""

    def _added(self, parts: list[Tensor]) -> Tensor:
        """Counts of all ranks, added up in their order."""
        return torch.stack(parts).sum(0)

    @override
    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        sequences = [sequence for row in rows for sequence in row]
        found: list[Columns] = [{} for _ in sequences]
        for name, computed_K in self._columns(columns, rows).items():
            values = iter(computed_K.tolist())
            for own, sequence in zip(found, sequences, strict=True):
                own[name] = [next(values) for _ in sequence.trained]
        return found

"""One rank of a robot policy: a whole policy in fp32, its gradient added up over the ranks. Knows no steps, no wire.

Every rank holds the step's episodes and takes its share of each minibatch. Gradients are unnormalised sums, divided by
what they are over at the optimizer step, so neither the order of groups nor the split over ranks matters.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from headrace_modelkit.robot.directory import initial_policy, policy_of
from headrace_modelkit.robot.policy import ACTIONS, Observation, imitation_loss
from headrace_modelkit.tensor_files import whole
from headrace_modelkit.weights import load_weights, state_tensors, weight_layout
from headrace_schema.openings import TrainerConfig
from torch import Tensor, nn
from typing_extensions import override

from headrace_trainer.algorithms.episodes._base import EpisodeAlgorithm
from headrace_trainer.backends._base import (
    EpisodeBackend,
    MicroReport,
    ReferenceFacts,
    StatePart,
    StateReader,
    WarmUp,
)
from headrace_trainer.backends.robot.cloning import drawn_moments, noise_seed, read_demonstrations
from headrace_trainer.backends.robot.episodes import (
    Chunks,
    Credits,
    join,
    read_chunks,
    read_credits,
    read_final,
    units,
)
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.backends.shared.fit import check_state_shapes
from headrace_trainer.backends.shared.model import LearnedModel
from headrace_trainer.backends.shared.optimizer import MOMENTS, ShardedAdamW
from headrace_trainer.errors import Refusal, invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import (
    Columns,
    CreditData,
    EpisodeData,
    EpisodeKey,
    EpisodeScores,
    Packed,
    Rows,
)
from headrace_trainer.memory import MemoryPlan, Rooms

if TYPE_CHECKING:
    from headrace_modelkit.robot.directory import AnyPolicy

FP32 = 4
STATE = {"masters": 1, "moments": 2, "gradients": 2}
"""How often a rank has all weights in fp32."""
STATE_BYTES = sum(STATE.values()) * FP32
"""Of each weight, on each rank."""
CRITIC = ("critic.", "value_head.")
"""What names of a critic's own weights begin with."""
PATCH_PIXELS = 14 * 14
"""Pixels of an image that count as a token in `micro_batch_tokens`."""


class RobotBackend(LearnedModel, EpisodeBackend):
    """A whole policy on each rank; `EpisodeBackend` is in place of `micro` and `infer`."""

    shares_prefixes = False
    reference: ReferenceFacts | None = None
    reference_bytes = 0

    def __init__(self, config: TrainerConfig, algorithm: EpisodeAlgorithm, ranks: TrainerGroup) -> None:
        super().__init__(config, algorithm, ranks)
        self._algorithm: EpisodeAlgorithm = algorithm
        self._read: dict[EpisodeKey, Chunks] = {}
        self._chunks: Chunks | None = None
        self._credits: Credits | None = None
        self._loaded: AnyPolicy | None = None
        self._parameters: dict[str, nn.Parameter] = {}
        """Those of the loaded policy by name: to walk its modules for them takes as long as a small policy's pass."""
        self._optimizer: ShardedAdamW | None = None

    @property
    @override
    def replicas(self) -> int:
        return self._ranks.world_size

    @property
    @override
    def replica(self) -> int:
        return self._ranks.rank

    # The step's episodes

    def read(self, episodes: Many[EpisodeData]) -> list[EpisodeScores]:
        """Keeps episodes, and scores this rank's share of them under the weights of the moment."""
        for data in episodes:
            self._read[data.key] = read_chunks(data)
        return [self._score(data) for data in episodes[self._ranks.rank :: self._ranks.world_size]]

    def credit(self, data: CreditData) -> None:
        """Lays out the named episodes for learning, with what their chunks are worth."""
        self._chunks = join([self._read[key] for key in data.keys])
        self._credits = read_credits(data)

    def learn(self, chunks: list[int]) -> MicroReport:
        """Accumulates the loss gradient of these chunks; none: takes part alone."""
        assert self._chunks is not None and self._credits is not None
        finite = True
        for index in self._parts(torch.tensor(chunks, dtype=torch.long), self._chunks.observation):
            taken = self._chunks.take(index, self._ranks.device)
            found = self._policy.evaluate(taken.observation, taken.sampled)
            batch = units(found, self._credits, index, self._algorithm.level)
            sums = self._algorithm.loss(batch)
            finite = finite and bool(torch.isfinite(sums.loss))
            torch.autograd.backward(sums.loss)
            self._figures.add(sums, batch)
            assert batch.entropy_K is not None
            self._figures.add_entropy(batch.entropy_K.detach())
        return MicroReport(self._ranks.all_true(finite))

    def end_episodes(self, *, learned: bool) -> None:
        """Drops the episodes; when `learned`, what the policy saw in them goes into its normaliser first."""
        normalizer = self._policy.normalizer
        if learned and normalizer is not None and self._chunks is not None:
            seen = self._chunks.observation.state_BS
            assert seen is not None
            normalizer.update(seen.to(self._ranks.device))
        self._read, self._chunks, self._credits = {}, None, None

    @torch.no_grad()
    def _score(self, data: EpisodeData) -> EpisodeScores:
        """Episode by episode: what else is read makes no difference to the last bit."""
        chunks, final = self._read[data.key], read_final(data)
        parts = self._parts(torch.arange(len(chunks.valid_NC)), chunks.observation)
        taken = [chunks.take(index, self._ranks.device) for index in parts]
        found = [self._policy.evaluate(each.observation, each.sampled) for each in taken]
        value = 0.0 if final is None else self._final_value(final, chunks)
        return EpisodeScores(
            data.key,
            Packed.of(torch.cat([each.log_probs_BCA for each in found]).cpu().numpy()),
            Packed.of(torch.cat([each.values_B for each in found]).cpu().numpy()),
            value,
        )

    def _final_value(self, final: Observation, chunks: Chunks) -> float:
        """The critic's value of an observation; the actions that are scored with it do not matter."""
        drawn = {name: value[:1] for name, value in chunks.sampled.items()}
        taken = Chunks(final, drawn, chunks.valid_NC[:1]).take(
            torch.zeros(1, dtype=torch.long), self._ranks.device
        )
        return float(self._policy.evaluate(taken.observation, taken.sampled).values_B[0])

    def _parts(self, chunks: Tensor, seen: Observation) -> tuple[Tensor, ...]:
        """The chunks of each forward; none where this rank has no chunk, which not every policy can read."""
        return torch.split(chunks, self._micro_batch(seen)) if len(chunks) else ()

    def _micro_batch(self, seen: Observation) -> int:
        """Chunks of one forward: each has its actions, its instruction's ids and its images' patches."""
        patches = sum(image.shape[1] * image.shape[2] // PATCH_PIXELS for image in seen.images.values())
        longest = max(map(len, seen.prompts), default=0)
        places = self._policy.chunk_length + longest + patches
        return max(1, self._config.trainer.micro_batch_tokens // places)

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
    def load_reference(self) -> None:
        """Episodes are compared with no reference."""

    @override
    def warm_up(self) -> WarmUp:
        """The policy's normaliser is fitted to the demonstrations' states first, and then stays.

        A clone knows its states only as they were normalised when it learned: other statistics would make other
        actions of the same states.
        """
        warmup = self._config.trainer.warmup
        shown = read_demonstrations(self._config, self._policy)
        if self._policy.normalizer is not None and shown.observation.state_BS is not None:
            self._policy.normalizer.update(shown.observation.state_BS.to(self._ranks.device))
            self._policy.normalizer.freeze()
        losses = [self._imitate(shown, step) for step in range(warmup.steps)]
        self._take(self._policy)
        figures = {"moments": len(shown.valid_NC), "first_loss": losses[0], "last_loss": losses[-1]}
        return WarmUp(warmup.steps, {f"warmup_{name}": float(value) for name, value in figures.items()})

    def _imitate(self, shown: Chunks, step: int) -> float:
        """One supervised step: the mean loss of the actions that are imitated. Raises Refusal INVALID."""
        warmup, ranks = self._config.trainer.warmup, self._ranks
        chosen = drawn_moments(self._config.seed, step, warmup.batch, len(shown.valid_NC))
        own, summed = (
            torch.tensor(chosen[ranks.rank :: ranks.world_size], dtype=torch.long),
            0.0,
        )
        for index in self._parts(own, shown.observation):
            taken = shown.take(index, ranks.device)
            seeds = [noise_seed(self._config.seed, step, row) for row in index.tolist()]
            losses_BH = self._policy.imitate(taken.observation, taken.sampled[ACTIONS], seeds)
            loss = imitation_loss(losses_BH, taken.valid_NC) * taken.valid_NC.sum()
            torch.autograd.backward(loss)
            summed += float(loss.detach())
        count = float(shown.valid_NC[chosen].sum())
        if not self.commit(count, warmup.lr).finite:
            reason = f"the gradient of supervised step {step} is not finite; lower it"
            raise invalid(f"trainer.warmup.lr: {reason}", key="trainer.warmup.lr")
        return ranks.sum({"loss": summed})["loss"] / count

    @override
    def weight_layout(self) -> list[tuple[str, str, tuple[int, ...]]]:
        layout = weight_layout(self._policy, torch.float32)
        return [(name, str(dtype).removeprefix("torch."), shape) for name, dtype, shape in layout]

    @override
    def weights(self) -> Iterator[tuple[str, Tensor]]:
        return ((name, tensor.detach().cpu()) for name, tensor in state_tensors(self._policy))

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

    # Answers of a language model

    def micro(self, rows: Rows) -> MicroReport:
        """Refused: there are no tokens to learn from."""
        raise invalid("this run learns from episodes, not from answers")

    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        """Refused: there are no tokens to score."""
        raise invalid("this run learns from episodes, not from answers")

    # Parts

    def _fresh(self) -> AnyPolicy:
        config = policy_of(self._config.model)
        assert config is not None
        return config.build(self._config.seed).eval()

    def _take(self, policy: AnyPolicy) -> None:
        self._loaded = policy.to(self._ranks.device)
        self._parameters = dict(policy.named_parameters())
        for _, tensor in state_tensors(policy):
            self._ranks.share(tensor.data)
        decays = {name for name, parameter in policy.named_parameters() if parameter.dim() > 1}
        critic = frozenset(name for name in self._shards() if name.startswith(CRITIC))
        self._optimizer = ShardedAdamW(self._config.optimizer, self._shards(), decays=decays, critic=critic)

    @override
    def _shards(self) -> dict[str, Tensor]:
        return {name: parameter.data for name, parameter in self._parameters.items()}

    @property
    def _policy(self) -> AnyPolicy:
        if self._loaded is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._loaded

    @property
    @override
    def _adamw(self) -> ShardedAdamW:
        if self._optimizer is None:
            raise Refusal("NOT_OPEN", "no weights are loaded; call Restore first")
        return self._optimizer

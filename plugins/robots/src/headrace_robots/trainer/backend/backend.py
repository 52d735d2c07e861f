"""What one rank of a robot policy does with episodes, however the policy lies on the ranks. Knows no steps, no wire.

Every rank holds the step's episodes, with pictures of its own, and takes its share of each minibatch. Gradients are
unnormalised sums, divided by what they are over at the optimizer step, so neither the order of groups nor the split
over ranks matters.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from collections.abc import Sequence as Many
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch
from headrace_schema.openings import TrainerConfig
from headrace_schema.progress import counter
from headrace_trainer.backends._base import EpisodeBackend, ReferenceFacts, WarmUp
from headrace_trainer.backends.shared.model import LearnedModel
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import (
    Columns,
    CreditData,
    EpisodeData,
    EpisodeKey,
    EpisodeScores,
    LentPictures,
    Packed,
    Rows,
)
from torch import Tensor
from typing_extensions import override

from headrace_robots.policies.policy import Evaluation, Observation, imitation_loss
from headrace_robots.trainer.algorithms._base import EpisodeAlgorithm
from headrace_robots.trainer.backend.cloning import (
    IMITATION,
    SOURCE_KEY,
    Moments,
    drawn_moments,
    noise_seed,
    read_demonstrations,
    refused,
)
from headrace_robots.trainer.backend.episodes import (
    Chunks,
    Credits,
    StepChunks,
    read_chunks,
    read_credits,
    read_final,
    units,
)
from headrace_robots.trainer.moments import moment_of, moments_batch

if TYPE_CHECKING:
    from headrace_robots.policies.policy import RobotPolicy

CRITIC = ("critic.", "value_head.")
"""What names of a critic's own weights begin with."""


class RobotBackend(LearnedModel, EpisodeBackend):
    """A robot policy that learns; `EpisodeBackend` is in place of `micro` and `infer`."""

    shares_prefixes = False
    reference: ReferenceFacts | None = None
    reference_bytes = 0

    def __init__(
        self, config: TrainerConfig, algorithm: EpisodeAlgorithm, ranks: TrainerGroup, **options: Any
    ) -> None:
        super().__init__(config, algorithm, ranks, **options)
        self._algorithm: EpisodeAlgorithm = algorithm
        self._micro_batch_tokens = config.trainer.micro_batch_tokens
        self._read: dict[EpisodeKey, Chunks] = {}
        self._chunks: StepChunks | None = None
        self._credits: Credits | None = None

    @property
    @abstractmethod
    def _policy(self) -> RobotPolicy:
        """The policy, whose weights may be elsewhere. Raises Refusal NOT_OPEN before weights are loaded."""

    @abstractmethod
    def _evaluate(self, taken: Chunks) -> Evaluation:
        """Scores chunks under the weights of the moment; all ranks call it, as often as each other."""

    @abstractmethod
    def _imitation_losses(self, taken: Chunks, seeds: Many[int]) -> Tensor:
        """(B, H), as `RobotPolicy.imitate`; all ranks call it, as often as each other."""

    @abstractmethod
    def _missing(self, passes: int) -> int:
        """How many passes this rank has to make beside its own, for others that have more and make them with it."""

    @abstractmethod
    def _warmed_up(self) -> None:
        """Empties the optimizer after a warm-up."""

    @property
    @override
    def replicas(self) -> int:
        return self._ranks.world_size

    @property
    @override
    def replica(self) -> int:
        return self._ranks.rank

    # The step's episodes

    def read(self, episodes: Many[EpisodeData], own: Many[int]) -> list[EpisodeScores]:
        """Keeps episodes, and scores the rank's own under the weights of the moment."""
        for data in episodes:
            self._read[data.key] = read_chunks(data)
        if not episodes:
            return []
        mine = [episodes[place] for place in own]
        passes = [len(self._every_part(self._read[data.key])) + bool(data.final) for data in mine]
        missing = self._missing(sum(passes))
        scores = [self._score(data) for data in mine]
        with torch.no_grad():
            self._take_part(missing, self._read[episodes[0].key], self._summed)
        return scores

    def credit(self, data: CreditData) -> None:
        """Lays out the named episodes for learning, with what their chunks are worth."""
        self._chunks = StepChunks.of([self._read[key] for key in data.keys])
        self._credits = read_credits(data)

    def learn(self, chunks: list[int], lent: LentPictures) -> bool:
        """Accumulates the loss gradient of these chunks, with pictures of some; none: takes part alone."""
        assert self._chunks is not None and self._credits is not None
        finite, own = True, self._chunks.lend(lent)
        parts = self._parts(torch.tensor(chunks, dtype=torch.long), self._chunks.observation)
        missing = self._missing(len(parts))
        for index in parts:
            found = self._evaluate(own.take(index, self._ranks.device))
            batch = units(found, self._credits, index, self._algorithm.level)
            sums = self._algorithm.loss(batch)
            finite = finite and bool(torch.isfinite(sums.loss))
            torch.autograd.backward(sums.loss)
            self._figures.add(sums, batch)
            assert batch.entropy_K is not None
            self._figures.add_entropy(batch.entropy_K.detach())
        self._take_part(missing, self._chunks, self._summed)
        return self._ranks.all_true(finite)

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
        taken = [chunks.take(index, self._ranks.device) for index in self._every_part(chunks)]
        found = [self._evaluate(each) for each in taken]
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
        return float(self._evaluate(taken).values_B[0])

    def _summed(self, taken: Chunks) -> Tensor:
        """A number that hangs on all that a pass gives."""
        found = self._evaluate(taken)
        return found.log_probs_BCA.sum() + found.values_B.sum()

    def _take_part(self, passes: int, chunks: Chunks, summed: Callable[[Chunks], Tensor]) -> None:
        """Passes over one chunk that count nothing: others gather weights and reduce gradients with this rank."""
        for _ in range(passes):
            found = summed(chunks.take(torch.zeros(1, dtype=torch.long), self._ranks.device))
            if found.requires_grad:
                torch.autograd.backward(found, torch.zeros_like(found))

    def _every_part(self, chunks: Chunks) -> tuple[Tensor, ...]:
        return self._parts(torch.arange(len(chunks.valid_NC)), chunks.observation)

    def _parts(self, chunks: Tensor, seen: Observation) -> tuple[Tensor, ...]:
        """The chunks of each forward; none where this rank has no chunk, which not every policy can read."""
        return torch.split(chunks, self._micro_batch(seen)) if len(chunks) else ()

    def _micro_batch(self, seen: Observation) -> int:
        """Chunks of one forward: each has its actions, its instruction's ids and its images' patches."""
        places = self._policy.chunk_tokens + max(map(len, seen.prompts), default=0)
        return max(1, self._micro_batch_tokens // places)

    @override
    def reduce(self, micro_batch_tokens: int, *, recomputes: bool) -> None:
        self._micro_batch_tokens = micro_batch_tokens

    # Demonstrations

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
        self._fit_normalizer(shown)
        losses: list[float] = []
        counter().begin(warmup.steps, "steps")
        for step in range(warmup.steps):
            losses.append(self._imitate(shown, step))
            counter().add(note=f"loss {losses[-1]:.3g}")
        self._warmed_up()
        figures = {"moments": len(shown.valid_NC), "first_loss": losses[0], "last_loss": losses[-1]}
        return WarmUp(warmup.steps, {f"warmup_{name}": float(value) for name, value in figures.items()})

    def _imitate(self, shown: Moments, step: int) -> float:
        """One supervised step: the mean loss of the actions that are imitated. Raises Refusal INVALID."""
        warmup, ranks = self._config.trainer.warmup, self._ranks
        chosen = drawn_moments(self._config.seed, step, warmup.batch, len(shown.valid_NC))
        own, summed = torch.tensor(chosen[ranks.rank :: ranks.world_size], dtype=torch.long), 0.0
        parts = self._parts(own, shown.observation)
        missing = self._missing(len(parts))
        for index in parts:
            seeds = [noise_seed(self._config.seed, step, row) for row in index.tolist()]
            losses_BH, valid_BH = self._imitation(shown, index, seeds)
            loss = imitation_loss(losses_BH, valid_BH) * valid_BH.sum()
            torch.autograd.backward(loss)
            summed += float(loss.detach())
        self._take_part(missing, shown, self._summed_imitation)
        count = float(shown.valid_NC[chosen].sum())
        if not self.commit(count, warmup.lr).finite:
            reason = f"the gradient of supervised step {step} is not finite; lower it"
            raise invalid(f"trainer.warmup.lr: {reason}", key="trainer.warmup.lr")
        return ranks.sum({"loss": summed})["loss"] / count

    def _imitation(self, shown: Moments, index: Tensor, seeds: Many[int]) -> tuple[Tensor, Tensor]:
        """(B, H) losses of imitating what came next at these moments, and which of them there are."""
        taken = shown.take(index, self._ranks.device)
        return self._imitation_losses(taken, seeds), taken.valid_NC

    def _summed_imitation(self, taken: Chunks) -> Tensor:
        return self._imitation_losses(taken, [0]).sum()

    # A run that imitates alone: its samples name moments (`trainer.moments`), and an action is a token

    def _begin(self) -> None:
        """Of a run that imitates alone, fits the normaliser of its first version as a warm-up does."""
        if self._config.algorithm.name == IMITATION:
            self._fit_normalizer(self._moments)

    def _fit_normalizer(self, shown: Moments) -> None:
        if self._policy.normalizer is not None and shown.observation.state_BS is not None:
            self._policy.normalizer.update(shown.observation.state_BS.to(self._ranks.device))
            self._policy.normalizer.freeze()

    @cached_property
    def _moments(self) -> Moments:
        return read_demonstrations(self._config, self._policy)

    @override
    def micro(self, rows: Rows, told: list[float] | None = None) -> bool:
        """Accumulates the gradient of imitating the moments of these samples. Raises Refusal INVALID."""
        finite, log_probs_K = True, self._imitated_log_probs(rows)
        if log_probs_K is not None:
            batch = moments_batch(rows, log_probs_K)
            sums = self._algorithm.loss(batch)
            finite = bool(torch.isfinite(sums.loss))
            torch.autograd.backward(sums.loss)
            self._figures.add(sums, batch)
        self._take_part(self._missing(int(bool(rows))), self._moments, self._summed_imitation)
        return self._ranks.all_true(finite)

    @override
    @torch.no_grad()
    def infer(self, rows: Rows, columns: Many[str]) -> list[Columns]:
        """The negative loss of each action as its log-prob. Raises Refusal INVALID."""
        found_K = self._imitated_log_probs(rows)
        self._take_part(self._missing(int(bool(rows))), self._moments, self._summed_imitation)
        values = iter([] if found_K is None else found_K.tolist())
        return [{columns[0]: [next(values) for _ in each.trained]} for row in rows for each in row]

    def _imitated_log_probs(self, rows: Rows) -> Tensor | None:
        """(K,) of the actions of all samples, in their order; None where there is no sample."""
        if self._config.algorithm.name != IMITATION:
            raise invalid("this run learns from episodes, not from answers")
        samples = [sample for row in rows for sample in row]
        if not samples:
            return None
        index = torch.tensor([self._moments.number(*moment_of(each)) for each in samples])
        seeds = [noise_seed(self._config.seed, *each.slot, *moment_of(each)) for each in samples]
        losses_BH, valid_BH = self._imitation(self._moments, index, seeds)
        if valid_BH.sum(1).tolist() != [len(each.trained) for each in samples]:
            raise refused("has episodes of other lengths than rows name: it has changed", SOURCE_KEY)
        return -losses_BH[valid_BH]

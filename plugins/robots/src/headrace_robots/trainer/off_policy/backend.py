"""A small robot policy that learns off policy: on each rank whole, with the store of the rank's own episodes.

Knows no steps and no wire. Shapes: B transitions of this rank, T chunks of an episode, C actions of a chunk, A numbers
of an action.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Iterator
from collections.abc import Sequence as Many
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch
from headrace_modelkit.pinned import rooms_of
from headrace_schema.openings import TrainerConfig
from headrace_schema.progress import counter
from headrace_servicekit.rpc.episodes import STATE
from headrace_trainer.backends._base import CommitReport, StatePart, StateReader, WarmUp
from headrace_trainer.backends.shared.figures import TokenFigures
from headrace_trainer.errors import invalid
from headrace_trainer.group.group import TrainerGroup
from headrace_trainer.learning.samples import CreditData, EpisodeData, EpisodeScores, LentPictures, Packed
from headrace_trainer.memory import MemoryPlan, Rooms
from torch import Tensor
from typing_extensions import override

from headrace_robots.policies.directory import load_policy
from headrace_robots.policies.policy import RobotPolicy
from headrace_robots.trainer.backend.whole import WholeRobot
from headrace_robots.trainer.off_policy.algorithm import OffPolicyAlgorithm
from headrace_robots.trainer.off_policy.batches import batch_of, joined, stored_of
from headrace_robots.trainer.off_policy.imitation import UPDATES, DaggerUpdate
from headrace_robots.trainer.off_policy.parts import Held, Parts, critic_name
from headrace_robots.trainer.off_policy.plugins import PERSON
from headrace_robots.trainer.off_policy.updates import ACTOR, DIFFERENCES, Batch
from headrace_robots.trainer.replay.demonstrations import demonstrated
from headrace_robots.trainer.replay.opening import open_store, sampling_of, spaces_of
from headrace_robots.trainer.replay.records import StoreProblem
from headrace_robots.trainer.replay.ring import Ring
from headrace_robots.trainer.replay.store import ReplayStore

FIRST = 1 << 40
"""Added to the numbers of updates, of which those of a warm-up are below 0, for seeds."""
COMMITS = "replay/commits"
"""Name in a checkpoint of the store's commit that belongs to it."""


class OffPolicyRobot(WholeRobot):
    """The policy, what learns beside it, and the rank's store."""

    def __init__(
        self,
        config: TrainerConfig,
        algorithm: OffPolicyAlgorithm,
        ranks: TrainerGroup,
        directory: Path | None,
    ) -> None:
        super().__init__(config, algorithm, ranks)  # type: ignore[arg-type]
        self._off_policy, self._options = algorithm, algorithm.options
        self._directory = None if directory is None else directory / "replay"
        self._parts_beside: Parts | None = None
        self._store: ReplayStore | None = None
        self._shown: ReplayStore | None = None
        """Demonstrations, where some of each batch are."""
        self._pending: list[EpisodeData] = []
        self._seen: list[Packed] = []
        """The states of all ranks' episodes, for the normaliser."""
        self._due: list[int] = []
        self._imitates = False
        self._held_parts: Held | None = None
        self._saved: list[int] = []
        """Commits of the newest snapshots, which a restore may go back to."""

    @property
    def store(self) -> ReplayStore:
        """The rank's episodes."""
        assert self._store is not None
        return self._store

    @property
    def parts(self) -> Parts:
        """What learns beside the policy."""
        assert self._parts_beside is not None
        return self._parts_beside

    # Loading

    @override
    def load_initial(self) -> None:
        super().load_initial()
        self._open(0)

    @override
    def check_state(self, reader: StateReader) -> None:
        super().check_state(reader)
        fresh = self._fresh()
        update = UPDATES[self._off_policy.name](fresh, self._options)
        Parts(update, fresh, self._optimizer_of(fresh), self._config.optimizer, self._ranks).check(
            reader, self._off_policy.name
        )

    @override
    def load_state(self, reader: StateReader | None) -> None:
        super().load_state(reader)
        self.parts.load(reader)
        commits = torch.zeros(1, dtype=torch.int64) if reader is None else reader.critic_weight(COMMITS)
        commits = commits.to(self._ranks.device)
        self._ranks.share(commits)
        self._open(int(commits))

    @override
    def _take(self, policy: RobotPolicy) -> None:
        super()._take(policy)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(self._config.seed)
            update = UPDATES[self._off_policy.name](policy, self._options)
        if isinstance(update, DaggerUpdate) and update.options.expert != PERSON:
            update.expert = load_policy(update.options.expert).to(self._ranks.device).requires_grad_(False)
        self._parts_beside = Parts(update, policy, self._adamw, self._config.optimizer, self._ranks)

    def _open(self, commits: int) -> None:
        """The store as it was at a commit, and the demonstrations. Raises Refusal INVALID."""
        ranks = self._ranks
        try:
            if self._store is not None:
                self._store.close()
            self._store, note = open_store(
                self._directory, self._options, self._policy, commits, ranks.rank, ranks.world_size
            )
            ranks.gather(
                b""
            )  # all have taken what they need of files that another number of ranks has written
            if ranks.leads and self._directory is not None:
                for path in self._directory.glob("*.sqlite*"):
                    if f"-of-{ranks.world_size:03}." not in path.name:
                        path.unlink()
            self.notes = [note] if note else []
            if self._options.demonstrations_share and self._shown is None:
                self._shown = self._read_demonstrations()
        except StoreProblem as error:
            raise _refused(error) from error

    def _read_demonstrations(self) -> ReplayStore:
        """The rank's share of them, in memory."""
        ranks, rewarded = self._ranks, bool(self.parts.update.learned)
        found = [*demonstrated(self._config, self._policy, ranks.rank, ranks.world_size, rewarded=rewarded)]
        capacity = 1 + sum(len(each.rewards_T) + 1 for each in found)
        store = ReplayStore(None, capacity, spaces_of(self._policy), sampling_of(self._options))
        for each in found:
            store.insert(replace(each, rewards_T=each.rewards_T * self._options.reward_scale))
        store.commit()
        return store

    @override
    def memory_plan(self, rooms: Rooms) -> MemoryPlan:
        plan = super().memory_plan(rooms)
        policy = self._fresh()
        spaces = spaces_of(policy)
        row = Ring(1, spaces.state_size, spaces.action_size).bytes
        update = UPDATES[self._off_policy.name](policy, self._options)
        weights = 4 * sum(
            tensor.numel()
            for part in (*update.learned.values(), *update.kept.values())
            for tensor in part.parameters()
        )
        rows = -(-self._options.capacity // self._ranks.world_size) * row
        return replace(plan, host={**plan.host, "replay": rows, "critics": 5 * weights})

    # The step's episodes

    @override
    def read(self, episodes: Many[EpisodeData], own: Many[int]) -> list[EpisodeScores]:
        """Keeps the rank's own until the commit; nothing is scored."""
        self._pending += [episodes[place] for place in own]
        self._seen += [data.observation[STATE] for data in episodes if STATE in data.observation]
        return []

    @override
    def credit(self, data: CreditData) -> None:
        """Nothing: critics say what a chunk is worth."""

    @override
    def learn(self, chunks: list[int], lent: LentPictures) -> bool:
        """Notes which updates `commit` makes."""
        self._due += chunks
        return True

    @override
    def zero(self) -> None:
        super().zero()
        self._due = []

    @override
    def gradient_is_finite(self) -> bool:
        return True

    @override
    def end_episodes(self, *, learned: bool) -> None:
        store, normalizer = self.store, self._policy.normalizer
        if learned and normalizer is not None and self._seen:
            states_NS = np.concatenate([each.array() for each in self._seen])
            normalizer.update(torch.from_numpy(states_NS).to(self._ranks.device))
        self._pending, self._seen = [], []
        try:
            if learned:
                store.commit()
            else:
                store.rollback()
        except StoreProblem as error:
            raise _refused(error) from error

    # Updates

    @override
    def commit(self, denominator: float, learning_rate: float, critic_rate: float = 0.0) -> CommitReport:
        if self._imitates:
            return super().commit(denominator, learning_rate, critic_rate)
        due, self._due = self._due, []
        pending, self._pending = self._pending, []
        figures: dict[str, float] = defaultdict(float)
        try:
            for data in pending:
                self.store.insert(
                    stored_of(data, self._policy, self.store.spaces, self._options.reward_scale)
                )
            self._set_rates(learning_rate)
            for number in due:
                self._update(number, self.store, self._shown, self._options.batch_size, figures)
        except StoreProblem as error:
            raise _refused(error) from error
        return self._report(due, figures)

    def _set_rates(self, rate: float) -> None:
        parts, critic = self.parts, getattr(self._options, "critic_lr", None)
        beside = rate if critic is None else rate * critic / self._config.optimizer.lr
        parts.rates = {ACTOR: rate, **dict.fromkeys(parts.update.learned, beside), "temperature": rate}
        parts.norms = {}

    def _update(
        self, number: int, store: ReplayStore, shown: ReplayStore | None, size: int, figures: dict[str, float]
    ) -> None:
        if not self.parts.finite:
            return
        batch, draws = self._drawn(number, store, shown, size)
        generator = torch.Generator().manual_seed(_seed(self._config.seed, number, self._ranks.rank))
        shape = tuple(batch.actions_BCA.shape)

        def noise() -> Tensor:
            return torch.randn(shape, generator=generator).to(self._ranks.device)

        found = self.parts.update(batch, number, noise, self.parts)
        self.parts.even()
        if (differences := found.pop(DIFFERENCES, None)) is not None:
            given = differences.cpu().numpy()
            for source, rows_B, place in draws:
                source.prioritise(rows_B, given[place : place + len(rows_B)])
        for name, value in found.items():
            figures[name] += float(value)
            figures[f"{name}#"] += 1

    def _drawn(
        self, number: int, store: ReplayStore, shown: ReplayStore | None, size: int
    ) -> tuple[Batch, list[tuple[ReplayStore, np.ndarray, int]]]:
        """This rank's part of an update's batch, and which rows of which store it is of, from which place on."""
        rank, world = self._ranks.rank, self._ranks.world_size
        share = (
            round(size * self._options.demonstrations_share)
            if shown is not None and shown is not store
            else 0
        )
        parts, draws, place = list[Batch](), list[tuple[ReplayStore, np.ndarray, int]](), 0
        for source, count in ((store, size - share), (shown, share)):
            own = count * (rank + 1) // world - count * rank // world
            if source is None or not own:
                continue
            generator = np.random.default_rng((self._config.seed, number + FIRST, rank, int(source is shown)))
            drawn = source.draw(own, generator)
            parts.append(
                batch_of(source, drawn, self._policy, self._ranks.device, size, is_shown=source is shown)
            )
            draws.append((source, drawn.rows_B, place))
            place += own
        return (joined(parts) if parts[1:] else parts[0]), draws

    def _report(self, due: list[int], figures: dict[str, float]) -> CommitReport:
        """Figures are means over the updates that have them."""
        count, parts, ranks = len(due), self.parts, self._ranks
        made = ranks.sum({name: float(value) for name, value in figures.items() if not name.endswith("#")})
        means = {name: value / max(1, figures[f"{name}#"]) for name, value in made.items()}
        sums = {**TokenFigures().sums(), "tokens": float(count)}
        sums["loss"] = count * means.get("critic_loss", means.get("actor_loss", 0.0))
        sums["entropy"] = count * means.get("policy_entropy", 0.0)
        sums |= {f"own.{name}": count * value for name, value in {**means, **self._of_store()}.items()}
        norms = [*parts.norms.get(ACTOR, [])]
        beside = [norm for name, own in parts.norms.items() if name != ACTOR for norm in own]
        finite = parts.finite and all(map(math.isfinite, means.values()))
        return CommitReport(
            ranks.all_true(finite),
            sum(norms) / len(norms) if norms else 0.0,
            sums,
            TokenFigures().maxima(),
            sum(beside) / len(beside) if beside else 0.0,
        )

    def _of_store(self) -> dict[str, float]:
        """How full the stores are, and how old what was drawn from them is: in steps, of the draws since the last
        commit.
        """
        store = self.store
        drawn, age = store.drawn()
        found = self._ranks.sum(
            {"chunks": float(len(store)), "episodes": float(len(store.episodes)), "drawn": drawn, "age": age}
        )
        return {
            "replay_chunks": found["chunks"],
            "replay_episodes": found["episodes"],
            "replay_age_mean": found["age"] / max(1.0, found["drawn"]),
        }

    # Demonstrations

    @override
    def warm_up(self) -> WarmUp:
        """Imitates demonstrations; what learns offline learns from them as it does later."""
        if not self.parts.update.offline:
            self._imitates = True
            try:
                return super().warm_up()
            finally:
                self._imitates = False
        warmup, figures = self._config.trainer.warmup, defaultdict[str, float](float)
        shown = self._shown or self._read_demonstrations()
        self._set_rates(warmup.lr)
        counter().begin(warmup.steps, "steps")
        for step in range(warmup.steps):
            self._update(-1 - step, shown, shown, warmup.batch, figures)
            counter().add()
        if not self.parts.finite:
            reason = "an update of the warm-up is not finite; lower it"
            raise invalid(f"trainer.warmup.lr: {reason}", key="trainer.warmup.lr")
        found = {
            name: value / figures[f"{name}#"] for name, value in figures.items() if f"{name}#" in figures
        }
        return WarmUp(warmup.steps, {f"warmup_{name}": value for name, value in found.items()})

    # State

    @override
    def hold(self) -> None:
        super().hold()
        self._held_parts = self.parts.copy(rooms_of(self._ranks.device).to_host)

    @override
    def end_hold(self, *, back: bool) -> None:
        super().end_hold(back=back)
        held, self._held_parts = self._held_parts, None
        if back and held is not None:
            self.parts.put_back(held)
            self.store.rollback()

    @override
    def moment_parts(self) -> Iterator[StatePart]:
        yield from super().moment_parts()
        number = self.store.commit_number
        commits = torch.tensor([number])
        yield from self._parts_of(
            (critic_name(name), tensor) for name, tensor in (*self.parts.tensors(), (COMMITS, commits))
        )
        self._saved = [*self._saved, number][-1 - self._config.checkpoint.keep :]
        if len(self._saved) > self._config.checkpoint.keep:
            self.store.forget(self._saved[0])

    @override
    def move(self, move: Callable[[Tensor], Tensor]) -> None:
        super().move(move)
        self.parts.move(move)


def _seed(seed: int, number: int, rank: int) -> int:
    return int(np.random.SeedSequence((seed, number + FIRST, rank)).generate_state(1, np.uint64)[0] >> 1)


def _refused(error: StoreProblem) -> Exception:
    return invalid(f"algorithm.options: the replay store: {error}", key="algorithm.options.capacity")

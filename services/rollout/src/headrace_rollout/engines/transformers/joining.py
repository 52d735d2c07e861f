"""How waiting samples get rows: their contexts are computed, computed behind what is kept, or placed.

Runs in the engine's thread. Draws no token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from headrace_modelkit.threads import Threads
from torch import Tensor

from headrace_rollout.engines.base import Policy, Refused
from headrace_rollout.engines.figures import Figures
from headrace_rollout.engines.rows import Rows
from headrace_rollout.engines.samples import Finish, Group, Stream
from headrace_rollout.engines.trajectory import Bounds, RunningTrajectory, StopMatcher
from headrace_rollout.engines.transformers.batch import Batch
from headrace_rollout.engines.transformers.cache import PrefillPlan, PromptKeys
from headrace_rollout.engines.transformers.kept import KeptContexts
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.transformers.queue import Admission, Arrivals, JoinQueue, Waiting
from headrace_rollout.engines.weight_memory import available_bytes

# Tokens of one prefill pass: bounds its memory, and how long running rows wait for joiners.
PREFILL_TOKENS = 4096
# Of what a device has free, how much the cache takes where no budget is set: the host has other processes, and a GPU
# needs room for a pass.
FREE_SHARE = {"cpu": 0.25, "cuda": 0.8}
# Of the cache's budget, how much conversations between two turns may take beside it.
KEPT_PART = 4


@dataclass(frozen=True)
class Joined:
    """New rows: those from `first` on get a token of their hidden states; ones before have all but their newest."""

    first: int
    hidden: list[Tensor]
    computed: bool
    """Whether a context was computed from its first token."""


class Joining:
    """Samples that wait for a row, and what is kept for those to come."""

    def __init__(
        self,
        model: PolicyModel,
        bounds: Bounds,
        rows: Rows,
        figures: Figures,
        threads: Threads,
        kv_cache_bytes: int | None,
    ) -> None:
        self._model, self._figures, self._threads = model, figures, threads
        self._rows, self._kv_cache_bytes = rows, kv_cache_bytes
        self._arrivals = Arrivals(bounds)
        self.kept = KeptContexts()
        self.reset()

    def reset(self) -> None:
        """Forgets what waits and what is kept."""
        self.kept.clear()
        self.queue = JoinQueue(self._rows.most, PREFILL_TOKENS)

    @torch.inference_mode()
    def settle_budget(self) -> None:
        """Settles what the cache may take; call it while no row holds any of it."""
        model = self._model
        model.learn_token_size()
        free = available_bytes(model.device) - model.missing_bytes
        share = FREE_SHARE.get(model.device.type, FREE_SHARE["cpu"])
        model.cache.budget_bytes = self._kv_cache_bytes or int(free * share)
        self.kept.budget_bytes = model.cache.budget_bytes // KEPT_PART

    def add(
        self, stream: Stream, groups: Sequence[Group], matcher: StopMatcher | None, policy: Policy
    ) -> list[tuple[RunningTrajectory, Finish]]:
        """Queues groups; returns the samples that are at their end already. Refused, nothing of them waits."""
        waiting = [self._arrivals.accept(stream, group, matcher) for group in groups]
        finished, self._arrivals.finished = self._arrivals.finished, []
        for contexts in waiting:
            self._check_room(contexts)
        for contexts in waiting:
            for context in contexts:
                self._take_moved(context, policy)
            self.queue.add(contexts)
        return finished

    def keep(self, batch: Batch, row: int, tokens: int | None) -> None:
        """A turn has ended whose conversation may go on: its newest token was not computed yet."""
        trajectory = batch.trajectories[row]
        if not self._goes_on(trajectory):
            return
        sampled, _ = batch.answer(row, tokens)
        ids = [*trajectory.prompt_ids, *sampled]
        length = min(int(batch.length[row]), len(ids))
        if self._model.cache.stateful and length < batch.length[row]:
            return  # states have read what a stop string cut off
        known = self._model.identity(ids, trajectory.images)[:length]
        key = (trajectory.stream.adapter, trajectory.key)
        self.kept.keep(key, known, self._model.cache.kept(row, length))

    def join(self, batch: Batch) -> Joined | None:
        """Gives rows to the samples that fit; None if none does."""
        running = [trajectory.full_length for trajectory in batch.trajectories]
        admissions = self.queue.take(running, self._model.cache.fits)
        if not admissions:
            return None
        extended = self._extend(admissions)
        first = batch.count
        moved = [a for a in admissions if a.waiting.keys is not None and a.waiting.hidden_D is None]
        kept = [a for a in admissions if a.waiting.keys is not None and a.waiting.hidden_D is not None]
        fresh = [admission for admission in admissions if admission.waiting.keys is None]
        contexts = [len(a.waiting.context_ids) for a in (*moved, *kept, *fresh) for _ in a.members]
        self._model.cache.join(batch.length[:first].tolist(), contexts)
        self._go_on(batch, moved, first)
        first += len(moved)
        hidden = self._place(kept, first)
        hidden += self._prefill(fresh, first + len(hidden))
        for admission in [*kept, *fresh]:
            waiting = admission.waiting
            shift = self._model.shift(waiting.context_ids, admission.images)
            for trajectory in admission.members:
                batch.join(
                    trajectory, len(waiting.context_ids), self._model.vocabulary_size, waiting.routes, shift
                )
        return Joined(first, hidden, extended or bool(fresh))

    def _take_moved(self, context: Waiting, policy: Policy) -> None:
        """Uses the keys and values that another engine with the same weights computed of a context."""
        given = context.members[0].cache
        # The newest token goes in with the next round.
        if given is not None and given.tokens == len(context.context_ids) - 1:
            context.keys = self._model.cache.keys_of(given, policy.digest)

    def _check_room(self, contexts: Sequence[Waiting]) -> None:
        """Refuses what would never fit, before anything of its submission waits."""
        cache = self._model.cache
        for waiting in contexts:
            kept = len(waiting.context_ids) if len(waiting.members) > 1 else 0
            needed = kept + max(member.full_length for member in waiting.members)
            if needed > cache.budget_tokens:
                bound = "rollout.engine_options.kv_cache_bytes" if self._kv_cache_bytes else "free memory"
                raise Refused(
                    "INVALID",
                    f"prompt {waiting.members[0].key.prompt_ordinal} may come to {needed} tokens, "
                    f"{needed * cache.token_bytes} bytes of keys and values, and {bound} allows "
                    f"{cache.budget_bytes}: set rollout.engine_options.kv_cache_bytes to as much where there is room, "
                    "or lower sampling.max_new_tokens",
                )

    def _extend(self, admissions: Sequence[Admission]) -> bool:
        """Computes contexts behind what is kept of the turns before."""
        found = [(admission, self._known(admission)) for admission in admissions]
        known = [(admission, keys) for admission, keys in found if keys is not None]
        if not known:
            return False
        contexts = [admission.waiting.context_ids for admission, _ in known]
        images = [admission.images for admission, _ in known]
        computed = sum(len(admission.waiting.context_ids) - keys.length for admission, keys in known)
        with self._threads.work("prefill", computed):
            hidden_ND, whole = self._model.extend(
                contexts,
                [keys for _, keys in known],
                images,
                [admission.waiting.adapter for admission, _ in known],
            )
        for (admission, _), hidden_D, keys in zip(known, hidden_ND, whole, strict=True):
            admission.waiting.keys, admission.waiting.hidden_D = keys, hidden_D
        self._figures.prefill_tokens += computed
        self._figures.shared_prompt_tokens -= computed  # Where it is placed, the whole is counted.
        return True

    def _known(self, admission: Admission) -> PromptKeys | None:
        waiting, first = admission.waiting, admission.members[0]
        if waiting.keys is not None or not self._goes_on(first):
            return None
        ids = self._model.identity(waiting.context_ids, admission.images)
        return self.kept.find((first.stream.adapter, first.key), ids)

    def _goes_on(self, trajectory: RunningTrajectory) -> bool:
        whole = self._model.routes.width or (self._model.looks_ahead and trajectory.images)
        return trajectory.stream.goes_on and self._model.continues and not whole

    def _go_on(self, batch: Batch, moved: Sequence[Admission], first: int) -> None:
        """Rows that another engine has begun: their next token comes with the next round."""
        keys = [admission.waiting.keys for admission in moved]
        self._model.cache.place(first, [each for each in keys if each is not None])
        for admission in moved:
            [trajectory] = admission.members
            batch.join(
                trajectory,
                len(admission.waiting.context_ids) - 1,
                self._model.vocabulary_size,
                trajectory.prefix.routes,
                self._model.shift(admission.waiting.context_ids, admission.images),
            )
            trajectory.cache = None
            self._figures.moved_tokens += len(admission.waiting.context_ids)

    def _place(self, admissions: Sequence[Admission], first: int) -> list[Tensor]:
        keys, hidden = [], []
        for admission in admissions:
            waiting = admission.waiting
            assert waiting.keys is not None and waiting.hidden_D is not None
            keys += [waiting.keys] * len(admission.members)
            hidden += [waiting.hidden_D] * len(admission.members)
            self._figures.shared_prompt_tokens += waiting.keys.length * len(admission.members)
        self._model.cache.place(first, keys)
        return hidden

    def _prefill(self, admissions: Sequence[Admission], first: int) -> list[Tensor]:
        if not admissions:
            return []
        contexts = [admission.waiting.context_ids for admission in admissions]
        keep = []
        for prompt, admission in enumerate(admissions):
            if admission.waiting.members:
                admission.waiting.keys = PromptKeys(len(contexts[prompt]))
                keep.append((prompt, admission.waiting.keys))
        prompt_of_row = [prompt for prompt, a in enumerate(admissions) for _ in a.members]
        self._model.cache.prefill(PrefillPlan(first, prompt_of_row, keep), self._model.device)
        computed = sum(map(len, contexts))
        with self._threads.work("prefill", computed):
            hidden_PD = self._model.prefill(
                contexts, [each.images for each in admissions], [each.waiting.adapter for each in admissions]
            )
        for admission, routes in zip(admissions, self._model.routes.prefilled(contexts), strict=False):
            admission.waiting.routes = routes
        for prompt, _ in keep:
            admissions[prompt].waiting.hidden_D = hidden_PD[prompt].clone()
        self._figures.prefill_tokens += computed
        self._figures.shared_prompt_tokens += (
            sum(len(contexts[prompt]) for prompt in prompt_of_row) - computed
        )
        return [hidden_PD[prompt] for prompt in prompt_of_row]

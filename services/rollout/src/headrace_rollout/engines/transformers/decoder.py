"""The decode loop: join, sample, settle, leave; one round is one token of every running row.

Everything here runs in the engine's one thread. Knows no asyncio and no wire.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Sequence

import numpy as np
import torch
from headrace_modelkit.threads import Threads
from headrace_modelkit.tokenizer import TextCodec
from headrace_servicekit.failpoints import failpoint_sync
from torch import Tensor

from headrace_rollout.engines.base import Policy, Refused
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.policy_state import require_installed
from headrace_rollout.engines.samples import Finish, Group, Routes, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.engines.trajectory import Bounds, RunningTrajectory, StopMatchers
from headrace_rollout.engines.transformers.batch import Batch
from headrace_rollout.engines.transformers.cache import PrefillPlan, PromptKeys
from headrace_rollout.engines.transformers.kept import KeptContexts
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.transformers.queue import Admission, Arrivals, JoinQueue, Waiting
from headrace_rollout.engines.transformers.sampling import RowDistributions, draw, process
from headrace_rollout.engines.weight_memory import available_bytes

# Tokens of one prefill pass: bounds its memory, and how long running rows wait for joiners.
PREFILL_TOKENS = 4096
# Of what a device has free, how much the cache takes where no budget is set: the host has other processes, and a GPU
# needs room for a pass.
FREE_SHARE = {"cpu": 0.25, "cuda": 0.8}
# Of the cache's budget, how much conversations between two turns may take beside it.
KEPT_PART = 4


class Decoder:
    """Running and waiting trajectories of one model."""

    def __init__(
        self,
        model: PolicyModel,
        codec: TextCodec,
        rows: int,
        figures: Figures,
        threads: Threads,
        kv_cache_bytes: int | None = None,
    ) -> None:
        self.model = model
        self.figures = figures
        self._threads = threads
        self.prefills = Prefills()
        self._rows = rows
        self._kv_cache_bytes = kv_cache_bytes
        self._eos = np.array(sorted(codec.eos_ids))
        self._arrivals = Arrivals(Bounds(model.context_limit, model.vocabulary_size, codec.eos_ids))
        self._outbox: dict[Stream, list[TrajectoryUpdate]] = defaultdict(list)
        self._matchers = StopMatchers(codec)
        self._distributions: RowDistributions | None = None
        self._wave = 0
        self.oldest = 0
        self.kept = KeptContexts()
        self.reset()

    def reset(self) -> None:
        """Forgets all trajectories."""
        self._batch = Batch(self._rows)
        self.model.cache.clear()
        self.kept.clear()
        self._queue = JoinQueue(self._rows, PREFILL_TOKENS)
        self._running_wave = 0
        self._distributions = None

    @property
    def living(self) -> int:
        """Running and waiting samples."""
        return self._batch.count + len(self._queue)

    @property
    def waiting(self) -> int:
        """Waiting samples."""
        return len(self._queue)

    def submit(self, stream: Stream, groups: Sequence[Group], *, accept: bool) -> None:
        """Queues groups; with `accept` false they come back at once as they are."""
        policy = self.require(stream.policy_number)
        wave = 0
        self._threads.fixed = stream.deterministic or self.model.device.type != "cpu"
        if stream.deterministic:
            self._wave += 1
            wave, groups = self._wave, sorted(groups, key=lambda group: group.prompt_ordinal)
        self._budget()
        waiting = [
            self._arrivals.accept(stream, group, self._matchers.of(stream.stop), wave) for group in groups
        ]
        finished, self._arrivals.finished = self._arrivals.finished, []
        for contexts in waiting:
            self._check_room(contexts)
        for contexts in waiting:
            for context in contexts:
                self._take_moved(context, policy)
            self._queue.add(contexts)
        for trajectory, finish in finished:
            self._outbox[trajectory.stream].append(trajectory.untouched(policy, finish=finish))
        if not accept or not stream.holds():
            self.stop(None, stream)
        self._flush()

    @torch.inference_mode()
    def _budget(self) -> None:
        """Settles what the cache may take, while no row holds any of it."""
        if not self.living:
            self.model.learn_token_size()
            free = available_bytes(self.model.device)
            share = FREE_SHARE.get(self.model.device.type, FREE_SHARE["cpu"])
            self.model.cache.budget_bytes = self._kv_cache_bytes or int(free * share)
            self.kept.budget_bytes = self.model.cache.budget_bytes // KEPT_PART

    def _take_moved(self, context: Waiting, policy: Policy) -> None:
        """Uses the keys and values that another engine with the same weights computed of a context."""
        given = context.members[0].cache
        # The newest token goes in with the next round.
        if given is not None and given.tokens == len(context.context_ids) - 1:
            context.keys = self.model.cache.keys_of(given, policy.digest)

    def _check_room(self, contexts: Sequence[Waiting]) -> None:
        """Refuses what would never fit, before anything of its submission waits."""
        cache = self.model.cache
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

    def require(self, number: int) -> Policy:
        """The installed policy. Refused when it is not `number`, nor took over the streams of that version."""
        return require_installed(self.model.policy, number, self.oldest)

    def stop(self, keys: Sequence[SlotKey] | None, stream: Stream | None) -> int:
        """Ends samples (None: all), of one stream or of any; their partial outputs go out."""
        policy = self.model.policy
        if policy is None:
            return 0
        wanted = None if keys is None else set(keys)

        def meant(trajectory: RunningTrajectory) -> bool:
            return (wanted is None or trajectory.key in wanted) and (
                stream is None or trajectory.stream is stream
            )

        if stream is not None and not stream.holds():
            stream.moving.set()  # It goes on where a lease is held.
        gone = self._queue.remove(meant)
        for trajectory in gone:
            self._outbox[trajectory.stream].append(trajectory.untouched(policy))
        rows = [row for row, trajectory in enumerate(self._batch.trajectories) if meant(trajectory)]
        for row in rows:
            self._send(row, None, stopped=True)
        with torch.inference_mode():
            self._remove(rows)
        self._flush()
        return len(gone) + len(rows)

    @torch.inference_mode()
    def begin_again(self) -> None:
        """Running rows wait with what they have as their prefix: they go on with weights that are installed now.

        Refused in a wave of a deterministic stream, whose rounding would change.
        """
        policy = self.model.policy
        self.kept.clear()
        if self._batch.count and self._running_wave:
            raise Refused("INVALID", "in_flight: a deterministic stream runs; pause first")
        running = []
        for row, trajectory in enumerate(self._batch.trajectories):
            end = int(self._batch.sampled[row] - self._batch.held_back[row])
            if trajectory.stream.chunk_tokens and end > self._batch.sent[row]:
                self._send(row, end)
                self._batch.sent[row] = end
            assert policy is not None
            tokens, log_probs = self._batch.answer(row)
            trajectory = trajectory.so_far(
                tokens, log_probs, int(self._batch.sent[row]), policy, self._routes(row)
            )
            running.append(Waiting(trajectory.context_ids(), [trajectory]))
        self._remove(range(self._batch.count))
        self._queue.begin_again(running)
        self._flush()

    @torch.inference_mode()
    def round(self) -> bool:
        """Admits what fits, then adds one token to every running row; true while there is more to do."""
        failpoint_sync("rollout.round")
        start = time.perf_counter()
        self._leave_unheld()
        self._join()
        if rows := self._batch.count:
            with self._threads.work("decode", rows):
                self._decode()
        self._flush()
        self.figures.busy_s += time.perf_counter() - start
        return bool(self.living)

    def _leave_unheld(self) -> None:
        """Samples of streams whose lease is not held any more come back: no token is made without one."""
        for stream in {trajectory.stream for trajectory in self._batch.trajectories} | self._queue.streams():
            if not stream.holds():
                self.stop(None, stream)

    def _join(self) -> None:
        running = [trajectory.full_length for trajectory in self._batch.trajectories]
        admissions = self._queue.take(running, self._running_wave, self.model.cache.fits)
        if not admissions:
            return
        start = time.perf_counter()
        self._running_wave = admissions[0].waiting.wave
        self._extend(admissions)
        first = self._batch.count
        moved = [a for a in admissions if a.waiting.keys is not None and a.waiting.hidden_D is None]
        kept = [a for a in admissions if a.waiting.keys is not None and a.waiting.hidden_D is not None]
        fresh = [admission for admission in admissions if admission.waiting.keys is None]
        contexts = [len(a.waiting.context_ids) for a in (*moved, *kept, *fresh) for _ in a.members]
        self.model.cache.join(self._batch.length[:first].tolist(), contexts)
        self._go_on(moved, first)
        first += len(moved)
        if not kept and not fresh:
            return
        hidden = self._place(kept, first)
        hidden += self._prefill(fresh, first + len(hidden))
        for admission in [*kept, *fresh]:
            waiting = admission.waiting
            shift = self.model.shift(waiting.context_ids, admission.images)
            for trajectory in admission.members:
                self._batch.join(
                    trajectory, len(waiting.context_ids), self.model.vocabulary_size, waiting.routes, shift
                )
        self._distributions = None
        self._advance(
            first, torch.stack(hidden)
        )  # The first tokens come to the host: the device has done it all.
        if fresh:
            self.prefills.add(start, time.perf_counter())

    def _extend(self, admissions: Sequence[Admission]) -> None:
        """Computes contexts behind what is kept of the turns before."""
        found = [(admission.waiting, self._known(admission)) for admission in admissions]
        known = [(waiting, keys) for waiting, keys in found if keys is not None]
        if not known:
            return
        start = time.perf_counter()
        contexts = [waiting.context_ids for waiting, _ in known]
        computed = sum(len(waiting.context_ids) - keys.length for waiting, keys in known)
        with self._threads.work("prefill", computed):
            hidden_ND, whole = self.model.extend(contexts, [keys for _, keys in known])
        for (waiting, _), hidden_D, keys in zip(known, hidden_ND, whole, strict=True):
            waiting.keys, waiting.hidden_D = keys, hidden_D
        self.figures.prefill_tokens += computed
        self.figures.shared_prompt_tokens -= computed  # Where it is placed, the whole is counted.
        self.prefills.add(start, time.perf_counter())

    def _known(self, admission: Admission) -> PromptKeys | None:
        waiting, first = admission.waiting, admission.members[0]
        if waiting.keys is not None or admission.images or not self._goes_on(first):
            return None
        return self.kept.find(first.key, waiting.context_ids)

    def _goes_on(self, trajectory: RunningTrajectory) -> bool:
        stream = trajectory.stream
        return stream.goes_on and not stream.deterministic and not self.model.route_width

    def _keep(self, row: int, kept: int | None) -> None:
        """A turn has ended whose conversation may go on: its newest token was not computed yet."""
        trajectory = self._batch.trajectories[row]
        if not self._goes_on(trajectory) or trajectory.images:
            return
        tokens, _ = self._batch.answer(row, kept)
        ids = [*trajectory.prompt_ids, *tokens]
        length = min(int(self._batch.length[row]), len(ids))
        self.kept.keep(trajectory.key, ids[:length], self.model.cache.kept(row, length))

    def _go_on(self, moved: Sequence[Admission], first: int) -> None:
        """Rows that another engine has begun: their next token comes with the next round."""
        keys = [admission.waiting.keys for admission in moved]
        self.model.cache.place(first, [each for each in keys if each is not None])
        for admission in moved:
            [trajectory] = admission.members
            self._batch.join(
                trajectory,
                len(admission.waiting.context_ids) - 1,
                self.model.vocabulary_size,
                trajectory.prefix.routes,
                self.model.shift(admission.waiting.context_ids, admission.images),
            )
            trajectory.cache = None
            self.figures.moved_tokens += len(admission.waiting.context_ids)
        if moved:
            self._distributions = None

    def _place(self, admissions: Sequence[Admission], first: int) -> list[Tensor]:
        keys, hidden = [], []
        for admission in admissions:
            waiting = admission.waiting
            assert waiting.keys is not None and waiting.hidden_D is not None
            keys += [waiting.keys] * len(admission.members)
            hidden += [waiting.hidden_D] * len(admission.members)
            self.figures.shared_prompt_tokens += waiting.keys.length * len(admission.members)
        self.model.cache.place(first, keys)
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
        self.model.cache.prefill(PrefillPlan(first, prompt_of_row, keep), self.model.device)
        computed = sum(map(len, contexts))
        with self._threads.work("prefill", computed):
            hidden_PD = self.model.prefill(contexts, [admission.images for admission in admissions])
        for admission, routes in zip(admissions, self.model.prefilled_routes(contexts), strict=False):
            admission.waiting.routes = routes
        for prompt, _ in keep:
            admissions[prompt].waiting.hidden_D = hidden_PD[prompt].clone()
        self.figures.prefill_tokens += computed
        self.figures.shared_prompt_tokens += sum(len(contexts[prompt]) for prompt in prompt_of_row) - computed
        return [hidden_PD[prompt] for prompt in prompt_of_row]

    def _decode(self) -> None:
        batch = self._batch
        rows = slice(0, batch.count)
        hidden_ND = self.model.decode(batch.last_tokens(), batch.length[rows], batch.shift[rows])
        for row, routes in enumerate(self.model.decoded_routes()):
            batch.routes[row].append(routes)
        batch.length[: batch.count] += 1
        self.figures.decode_steps += 1
        self.figures.decode_rows += batch.count
        self._advance(0, hidden_ND)

    def _advance(self, first: int, hidden_ND: Tensor) -> None:
        batch = self._batch
        logits_NV = self.model.head.logits(hidden_ND)
        rows = self._row_distributions(first)
        seen = batch.seen[first : batch.count] if batch.seen.shape[1] else None
        seen_NV = None if seen is None else torch.from_numpy(seen).to(logits_NV.device)
        uniform_N = torch.from_numpy(batch.uniforms(first)).to(logits_NV.device)
        tokens_N, log_probs_N = draw(process(logits_NV, rows, seen_NV), rows, uniform_N)
        batch.append(first, tokens_N.cpu().numpy(), log_probs_N.cpu().numpy())
        self.figures.sampled_tokens += len(tokens_N)
        self._settle(first)

    def _row_distributions(self, first: int) -> RowDistributions:
        trajectories = self._batch.trajectories[first:]
        if first or self._distributions is None:
            found = RowDistributions.of([s.distribution for s in trajectories], self.model.device)
            if first:
                return found
            self._distributions = found
        return self._distributions

    def _settle(self, first: int) -> None:
        """Sends the rows from `first` on that have ended, and the chunks that are due."""
        ended = self._batch.ended(first, self._eos)
        self._send_chunks([row for row in self._batch.due(first).tolist() if row not in ended])
        for row, (finish, kept) in ended.items():
            self._send(row, kept, finish=finish)
            self._keep(row, kept)
        self._remove(list(ended))

    def _send_chunks(self, rows: Sequence[int]) -> None:
        for row in rows:
            end = int(self._batch.sampled[row] - self._batch.held_back[row])
            self._send(row, end)
            self._batch.sent[row] = end

    def _send(
        self, row: int, count: int | None, *, finish: Finish | None = None, stopped: bool = False
    ) -> None:
        policy = self.model.policy
        assert policy is not None
        trajectory = self._batch.trajectories[row]
        tokens, log_probs = self._batch.answer(row, count)
        # A deterministic sample begins again at token 0.
        moves = stopped and trajectory.stream.moving.is_set() and not trajectory.stream.deterministic
        output = trajectory.output(
            tokens,
            log_probs,
            int(self._batch.sent[row]),
            policy,
            finish=finish,
            stopped=stopped,
            cache=self.model.cache.context_of(row, int(self._batch.length[row]), policy.digest)
            if moves
            else None,
            routes=self._routes(row),
        )
        self.figures.samples += finish is not None
        self._outbox[trajectory.stream].append(output)

    def _routes(self, row: int) -> Routes | None:
        width = self.model.route_width
        return Routes(b"".join(self._batch.routes[row]), width) if width else None

    def _remove(self, rows: Sequence[int]) -> None:
        if not rows:
            return
        targets, sources = self._batch.remove(rows)
        self.model.cache.remove(rows, dict(zip(sources, targets, strict=True)))
        self._distributions = None

    def _flush(self) -> None:
        for stream, outputs in self._outbox.items():
            stream.sink(outputs)
        self._outbox.clear()

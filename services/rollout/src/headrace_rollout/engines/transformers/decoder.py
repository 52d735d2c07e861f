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
from numpy.typing import NDArray
from torch import Tensor

from headrace_rollout.engines.base import Policy
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.policy_state import require_installed
from headrace_rollout.engines.rows import Rows
from headrace_rollout.engines.samples import Finish, Group, Routes, SlotKey, Stream, TrajectoryUpdate
from headrace_rollout.engines.trajectory import Bounds, RunningTrajectory, StopMatchers
from headrace_rollout.engines.transformers.batch import Batch
from headrace_rollout.engines.transformers.drafting import MOST_ROWS, LearnedDrafts, accepted
from headrace_rollout.engines.transformers.joining import Joining
from headrace_rollout.engines.transformers.kept import KeptContexts
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.transformers.queue import Waiting
from headrace_rollout.engines.transformers.sampling import RowDistributions, draw, process


class Decoder:
    """Running and waiting trajectories of one model."""

    def __init__(
        self,
        model: PolicyModel,
        codec: TextCodec,
        rows: Rows,
        figures: Figures,
        threads: Threads,
        kv_cache_bytes: int | None = None,
        speculative_tokens: int = 0,
    ) -> None:
        self.model = model
        self.figures = figures
        self._threads = threads
        self.prefills = Prefills()
        self._rows = rows
        self._speculative_tokens = speculative_tokens
        self._learned = None if model.drafts is None else LearnedDrafts(model, model.drafts)
        self._eos = np.array(sorted(codec.eos_ids))
        bounds = Bounds(model.context_limit, model.vocabulary_size, codec.eos_ids)
        self._joining = Joining(model, bounds, rows, figures, threads, kv_cache_bytes)
        self._outbox: dict[Stream, list[TrajectoryUpdate]] = defaultdict(list)
        self._matchers = StopMatchers(codec)
        self._distributions: RowDistributions | None = None
        self.oldest = 0
        self.reset()

    def reset(self) -> None:
        """Forgets all trajectories."""
        self._batch = Batch(self._rows.most)
        self.model.cache.clear()
        self._joining.reset()
        self._distributions = None

    @property
    def kept(self) -> KeptContexts:
        """What is kept of conversations between two turns."""
        return self._joining.kept

    @property
    def living(self) -> int:
        """Running and waiting samples."""
        return self._batch.count + len(self._joining.queue)

    @property
    def waiting(self) -> int:
        """Waiting samples."""
        return len(self._joining.queue)

    def submit(self, stream: Stream, groups: Sequence[Group], *, accept: bool) -> None:
        """Queues groups; with `accept` false they come back at once as they are."""
        policy = self.require(stream.policy_number)
        self._threads.fixed = self.model.device.type != "cpu"
        if not self.living:
            self._joining.settle_budget()
        finished = self._joining.add(stream, groups, self._matchers.of(stream.stop), policy)
        for trajectory, finish in finished:
            self._outbox[trajectory.stream].append(trajectory.untouched(policy, finish=finish))
        if not accept or not stream.holds():
            self.stop(None, stream)
        self._flush()

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
        gone = self._joining.queue.remove(meant)
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
        """Running rows wait with what they have as their prefix: they go on with weights that are installed now."""
        policy = self.model.policy
        self.kept.clear()
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
            adapter = trajectory.stream.adapter
            running.append(Waiting(trajectory.context_ids(), [trajectory], adapter=adapter))
        self._remove(range(self._batch.count))
        self._joining.queue.begin_again(running)
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
        for stream in {
            trajectory.stream for trajectory in self._batch.trajectories
        } | self._joining.queue.streams():
            if not stream.holds():
                self.stop(None, stream)

    def _join(self) -> None:
        start = time.perf_counter()
        joined = self._joining.join(self._batch)
        if joined is None:
            return
        self._distributions = None
        if joined.hidden:
            # The first tokens come to the host: the device has done it all.
            self._advance(joined.first, torch.stack(joined.hidden))
        if joined.computed:
            self.prefills.add(start, time.perf_counter())

    def _decode(self) -> None:
        batch = self._batch
        rows = slice(0, batch.count)
        drafts = self._drafts()
        longest = max(map(len, drafts), default=0)
        tokens_NT = np.zeros((batch.count, 1 + longest), dtype=np.int64)
        tokens_NT[:, 0] = batch.last_tokens()
        for row, draft in enumerate(drafts):
            tokens_NT[row, 1 : 1 + len(draft)] = draft
        adapters = [each.stream.adapter for each in batch.trajectories] if self.model.adapted else ()
        hidden_NTD = self.model.decode(tokens_NT, batch.length[rows], batch.shift[rows], adapters)
        for row, routes in enumerate(self.model.routes.decoded()):
            batch.routes[row].append(routes)
        self.figures.decode_steps += 1
        self.figures.decode_rows += batch.count
        if longest:
            self._advance_drafted(hidden_NTD, drafts)
            return
        batch.length[rows] += 1
        self._advance(0, hidden_NTD[:, 0])

    def _drafts(self) -> list[list[int]]:
        """What each row guesses of its next tokens; empty where nobody may or can."""
        batch = self._batch
        if not self._speculative_tokens and self._learned is None:
            return []
        most = min(self._speculative_tokens, MOST_ROWS // batch.count - 1)
        plain = self.model.routes.width or batch.seen.shape[1] or not self.model.takes_back
        if most < 1 or plain or batch.has_stop[: batch.count].any() or batch.shift[: batch.count].any():
            most = 0
        if self._learned is not None:
            return self._learned.draft(batch, most)
        if not most:
            return []
        left = batch.limit[: batch.count] - batch.sampled[: batch.count] - 1
        return [batch.history(row).draft(min(most, int(left[row]))) for row in range(batch.count)]

    def _advance_drafted(self, hidden_NTD: Tensor, drafts: Sequence[Sequence[int]]) -> None:
        """Draws a token behind each token of a draft; what stands is what would come without drafts."""
        batch = self._batch
        count, width = hidden_NTD.shape[:2]
        rows = RowDistributions.of(
            [each.distribution for each in batch.trajectories for _ in range(width)], self.model.device
        )
        tokens_NT, log_probs_NT = self._draw(hidden_NTD.flatten(0, 1), rows, batch.uniforms(0, width), None)
        tokens_NT, log_probs_NT = tokens_NT.reshape(count, width), log_probs_NT.reshape(count, width)
        counts = accepted(tokens_NT, drafts, self._eos)
        self.model.cache.states.stand(counts)
        self.figures.drafted_tokens += sum(map(len, drafts))
        self.figures.accepted_tokens += int((counts - 1).sum())
        batch.append(0, tokens_NT, log_probs_NT, counts)
        batch.length[:count] += counts
        self.figures.sampled_tokens += int(counts.sum())
        if self._learned is not None:
            self._learned.keep(batch, 0, hidden_NTD, counts)
        self._settle(0)

    def _advance(self, first: int, hidden_ND: Tensor) -> None:
        batch = self._batch
        rows = self._row_distributions(first)
        seen = batch.seen[first : batch.count] if batch.seen.shape[1] else None
        tokens_N, log_probs_N = self._draw(hidden_ND, rows, batch.uniforms(first), seen)
        batch.append(first, tokens_N[:, None], log_probs_N[:, None])
        self.figures.sampled_tokens += len(tokens_N)
        if self._learned is not None:
            self._learned.keep(batch, first, hidden_ND[:, None], np.ones(len(tokens_N), dtype=np.int64))
        self._settle(first)

    def _draw(
        self,
        hidden_ND: Tensor,
        rows: RowDistributions,
        uniform_N: NDArray[np.float32],
        seen_NV: NDArray[np.bool_] | None,
    ) -> tuple[NDArray[np.int64], NDArray[np.float32]]:
        logits_NV = self.model.logits(hidden_ND)
        seen = None if seen_NV is None else torch.from_numpy(seen_NV).to(logits_NV.device)
        uniform = torch.from_numpy(uniform_N).to(logits_NV.device)
        scores_NV = process(logits_NV, rows, seen)
        tokens_N, log_probs_N = draw(scores_NV, rows, uniform, exact=self.model.head.invariant)
        return tokens_N.cpu().numpy(), log_probs_N.cpu().numpy()

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
            self._joining.keep(self._batch, row, kept)
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
        moves = stopped and trajectory.stream.moving.is_set()
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
        width = self.model.routes.width
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

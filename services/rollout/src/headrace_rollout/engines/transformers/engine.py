"""The transformers engine: decode rounds in the thread that holds the model, so that a command acts between two."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from concurrent.futures import Future
from functools import partial
from traceback import clear_frames

import torch
from headrace_modelkit.devices import grow_segments, is_out_of_memory
from headrace_schema.images import MARKS, VISION_FAMILIES
from headrace_servicekit.causes import raised
from typing_extensions import override

from headrace_rollout.engines.base import (
    Authority,
    Capabilities,
    Engine,
    EngineConfig,
    Likeliest,
    Policy,
    Refused,
    allowed,
)
from headrace_rollout.engines.figures import Figures, Prefills
from headrace_rollout.engines.holding import ThreadedHolder
from headrace_rollout.engines.plugins import TransformersOptions
from headrace_rollout.engines.rows import Rows
from headrace_rollout.engines.samples import Distribution, Group, SlotKey, Stream
from headrace_rollout.engines.trajectory import check_scored
from headrace_rollout.engines.transformers.checking import check_model
from headrace_rollout.engines.transformers.decoder import Decoder
from headrace_rollout.engines.transformers.drafting import DRAFTED
from headrace_rollout.engines.transformers.passes import padded, passes
from headrace_rollout.engines.transformers.policy_model import PolicyModel
from headrace_rollout.engines.weight_memory import HOST

CAPABILITIES = Capabilities(
    position_keyed_sampling=True,
    deterministic=True,
    resume_from_prefix=True,
    resume_from_cache=True,
    inflight_update=True,
    score_processed=True,
    suspend_frees_memory=True,
    routed_experts=True,
    lora=True,
    images=VISION_FAMILIES,
    files=tuple(MARKS),
    learned_drafts=True,
    likeliest=True,
)
_log = logging.getLogger(__name__)


class TransformersEngine(ThreadedHolder, Engine):
    """Built without weights."""

    capabilities = CAPABILITIES
    installs_in_flight = CAPABILITIES.inflight_update

    def __init__(self, config: EngineConfig, options: TransformersOptions | None = None) -> None:
        options = options or TransformersOptions()
        self.figures = Figures()
        device = config.devices[0] if config.devices else HOST
        self._model = PolicyModel(
            config.model,
            device,
            routed_experts=config.routed_experts,
            images=config.codec.images,
            adapters=config.adapters,
            deterministic=config.deterministic,
            draft=config.draft,
        )
        super().__init__(self._model, "decode")
        if config.deterministic:
            self._threads.single = True
            self._executor.submit(self._threads.lease, 1)
        self._rows = Rows(config.max_concurrency, "rollout.engine_options.kv_cache_gib")
        drafted = options.speculative_tokens
        if drafted is None:
            drafted = DRAFTED if config.draft else 0
        self._decoder = Decoder(
            self._model,
            config.codec,
            self._rows,
            self.figures,
            self._threads,
            options.kv_cache_bytes,
            drafted,
        )
        self.max_context_tokens = self._model.context_limit
        self.vocabulary_size = self._model.vocabulary_size
        self._tried = False
        """Whether it computes the model right."""
        self._streams: set[Stream] = set()
        self._scheduled = False

    @property
    @override
    def prefills(self) -> Sequence[Prefills]:
        """Exact, as one thread does both."""
        return [self._decoder.prefills]

    @property
    @override
    def oldest(self) -> int:
        return self._decoder.oldest

    @property
    def waiting_samples(self) -> int:
        """Samples that have no row yet."""
        return self._decoder.waiting

    @property
    def kv_bytes(self) -> int:
        """Memory of the running samples' keys and values."""
        return self._decoder.model.cache.size_bytes

    @property
    def kv_token_bytes(self) -> int:
        """What one token of them takes; 0 before the first samples."""
        return self._decoder.model.cache.token_bytes

    @override
    async def submit(self, stream: Stream, groups: Sequence[Group]) -> None:
        """While paused, groups come back at once as partial outputs."""

        def act() -> None:
            self._streams.add(stream)
            self._decoder.submit(stream, groups, accept=not self._paused)
            self._schedule()

        await self._call(act)

    @override
    async def abort(self, keys: Sequence[SlotKey] | None, *, stream: Stream | None = None) -> int:

        def act() -> int:
            if keys is None and stream is not None:
                self._streams.discard(stream)
            return self._decoder.stop(keys, stream)

        return 0 if self._closed else await self._call(act)

    @override
    async def score(
        self,
        sequences: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority = allowed,
    ) -> tuple[list[list[float]], int]:
        """Passes are bounded, so that decoding goes on between them."""
        check_scored(sequences, distribution, self.max_context_tokens, self.vocabulary_size)
        policy = self.policy
        if policy is None:
            raise Refused("POLICY_MISMATCH", "no policy is installed; call InstallPolicy first")
        results: dict[int, list[float]] = {}
        for chosen in passes(sequences):
            part = [sequences[index] for index in chosen]
            found = await self._call(partial(self._score, policy, part, distribution, authority))
            results.update(zip(chosen, found, strict=True))
        return [results[index] for index in range(len(sequences))], policy.number

    async def likeliest(
        self, sequences: Sequence[tuple[Sequence[int], int]], top: int, authority: Authority = allowed
    ) -> list[list[Likeliest]]:
        """As `TellsLikeliest`, in one pass of the engine's thread."""
        check_scored(sequences, Distribution(), self.max_context_tokens, self.vocabulary_size)

        def compute() -> list[list[Likeliest]]:
            authority()
            found, model = [], self._model
            for ids, start in sequences:
                hidden_TD = model.hidden(padded([ids], model.device))[0, start - 1 : len(ids) - 1]
                log_probs_TV = model.head.logits(hidden_TD).float().log_softmax(-1)
                best = log_probs_TV.topk(min(top, self.vocabulary_size))
                found.append(list(zip(best.indices.tolist(), best.values.tolist(), strict=True)))
            return found

        return await self._call(compute)

    def _go_on(self) -> None:
        self._decoder.begin_again()

    def _begin_with(self, policy: Policy) -> None:
        if not self._tried:
            try:
                check_model(self._model)
            except Refused:
                self._model.free_memory()
                raise
            self._tried = True
        self._decoder.oldest = policy.number
        self._decoder.kept.clear()

    def _living(self) -> int:
        return self._decoder.living

    def _stop_all(self) -> int:
        return self._decoder.stop(None, None)

    def _forget_work(self) -> None:
        self._decoder.reset()

    def _schedule(self) -> None:
        if not self._scheduled and self._decoder.living:
            self._scheduled = True
            self._executor.submit(self._decoder.round).add_done_callback(self._after_round)

    def _after_round(self, finished: Future[bool]) -> None:
        self._scheduled = False
        error = finished.exception()
        if error is None:
            self._schedule()
            return
        _log.error("a decode round failed", exc_info=error)
        reason = raised(error)
        if full := is_out_of_memory(error):
            clear_frames(error.__traceback__)  # what they hold is what there is no room for
            reason = self._rows.without_memory(reason)
        self._decoder.reset()
        if full and self._model.device.type == "cuda":
            torch.cuda.empty_cache()
        for stream in self._streams:
            stream.failed(reason)
        self._streams.clear()

    def _score(
        self,
        policy: Policy,
        part: Sequence[tuple[Sequence[int], int]],
        distribution: Distribution,
        authority: Authority,
    ) -> list[list[float]]:
        authority()
        if self.policy != policy:
            raise Refused(
                "POLICY_MISMATCH", f"version {policy.number} was replaced while it scored; ask again"
            )
        return self._model.score(part, distribution)


def build(options: TransformersOptions, config: EngineConfig) -> Engine:
    """An engine for the config's model, without weights. Raises ModelNotReadable."""
    grow_segments()
    return TransformersEngine(config, options)

"""Requests of the backend as requests of SGLang, in the process that holds it. Imports SGLang; knows no weights.

A request that runs when the engine is frozen is aborted there and submitted again, with its tokens behind its prompt,
when the engine thaws. SGLang's own pause returns before its schedulers stand still: tokens of the version before could
come behind it. Here none can, and no request of that version holds a part of the cache that is flushed.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

from headrace_servicekit.process.worker_pipes import JsonMessage as Message
from sglang.srt.managers.io_struct import GenerateReqInput
from sglang.srt.managers.tokenizer_manager import TokenizerManager

FREEZE_S = 30.0


class Failed(Exception):
    """SGLang refused a call; the message says why."""


@dataclass(eq=False)
class _Running:
    """A request: what SGLang is asked to continue, and whether it goes on."""

    call: Message
    made: list[int] = field(default_factory=list)
    aborted: bool = False
    interrupted: bool = False
    """SGLang ended it early, for a freeze."""


class Generating:
    """The requests of one engine."""

    def __init__(self, manager: TokenizerManager, largest_mask: int) -> None:
        self._manager = manager
        self._largest_mask = largest_mask
        self._model_eos = set(manager.model_config.hf_eos_token_id or ())
        self._running: dict[str, _Running] = {}
        self._in_engine = 0
        self._freezes = 0
        self._frozen = False
        self._changed = asyncio.Condition()

    async def generate(self, call: Message) -> AsyncIterator[list[Any]]:
        """[ids, log-probs] as they come."""
        running = self._running[call["rid"]] = _Running(call)
        try:
            while True:
                async with self._changed:
                    await self._changed.wait_for(lambda: running.aborted or not self._frozen)
                if running.aborted:
                    return
                running.interrupted = False
                async for ids, log_probs in self._attempt(running):
                    running.made += ids
                    yield [ids, log_probs]
                if not running.interrupted:
                    return
        finally:
            del self._running[call["rid"]]

    async def abort(self, call: Message) -> None:
        """Ends requests; unknown ones are ignored."""
        for rid in call["rids"]:
            if rid in self._running:
                self._running[rid].aborted = True
            self._manager.abort_request(rid=rid)
        async with self._changed:
            self._changed.notify_all()

    async def freeze(self, call: Message) -> None:
        """Takes all requests out of SGLang. Raises Failed when some do not stop."""
        self._frozen = True
        self._freezes += 1
        for rid in self._running:
            self._manager.abort_request(rid=rid)
        try:
            async with asyncio.timeout(FREEZE_S), self._changed:
                await self._changed.wait_for(lambda: self._in_engine == 0)
        except TimeoutError as error:
            raise Failed(f"{self._in_engine} requests did not stop within {FREEZE_S:g} s") from error

    async def thaw(self, call: Message) -> None:
        """Goes on with what `freeze` took out."""
        async with self._changed:
            self._frozen = False
            self._changed.notify_all()

    async def score(self, call: Message) -> list[float]:
        """Log-probs of the ids from `start` on, at temperature 1.

        The last id is asked for as one that could come next: SGLang takes no prompt that fills the context.
        """
        *given, last = call["token_ids"]
        request = GenerateReqInput(
            input_ids=given,
            sampling_params={"temperature": 1.0, "max_new_tokens": 1, "ignore_eos": True},
            return_logprob=True,
            logprob_start_len=call["start"] - 1,
            token_ids_logprob=[last],
            cache_salt=call["rid"],  # nobody else's prefix
            rid=call["rid"],
        )
        async with aclosing(self._manager.generate_request(request, None)) as outputs:
            async for output in outputs:
                meta = output["meta_info"]
                _check_finish(meta.get("finish_reason"))
        wanted = len(given) - call["start"]
        rows = meta["input_token_logprobs"]  # from start - 1 on, which has none
        found = [row[0] for row in rows[len(rows) - wanted :]] if wanted else []
        ((log_prob, token, *_),) = meta["output_token_ids_logprobs"][0]
        if token != last or None in found or len(found) != wanted:
            raise Failed(f"{len(found)} of {wanted} log-probs came, and that of token {token} and not {last}")
        return [*found, log_prob]

    async def _attempt(self, running: _Running) -> AsyncIterator[tuple[list[int], list[float]]]:
        request = self._request(running)
        masked = bool(request.return_sampling_mask)
        self._in_engine += 1
        try:
            async with aclosing(self._manager.generate_request(request, None)) as outputs:
                async for output in outputs:
                    meta = output["meta_info"]
                    finish = meta.get("finish_reason")
                    _check_finish(finish)
                    running.interrupted = self._frozen and bool(finish) and finish["type"] == "abort"
                    if ids := output.get("output_ids"):  # none: aborted before its first token
                        yield ids, _log_probs(meta, len(ids), masked=masked)
        finally:
            self._in_engine -= 1
            async with self._changed:
                self._changed.notify_all()

    def _request(self, running: _Running) -> GenerateReqInput:
        call = running.call
        sampling = dict(call["sampling"])
        sampling["max_new_tokens"] -= len(running.made)
        # SGLang ends at the ends that the model's directory names, too. Where the run has fewer, it looks for none: the
        # adapter aborts behind the run's own.
        sampling["ignore_eos"] = not self._model_eos <= set(sampling["stop_token_ids"])
        truncated = sampling["top_p"] < 1 or sampling["top_k"] > 0 or sampling["min_p"] > 0
        masked = truncated and sampling["temperature"] > 0
        if masked and sampling["top_k"] < 1:
            # A mask is refused without a finite top-k; this one keeps every token.
            sampling["top_k"] = self._largest_mask
        return GenerateReqInput(
            input_ids=[*call["token_ids"], *running.made],
            sampling_params=sampling,
            rid=call["rid"],
            stream=True,
            return_logprob=True,
            # SGLang's log-probs are of the logits over the temperature, before top-p, top-k and min-p; those of what
            # is really drawn from come with the kept set.
            return_sampling_mask=masked,
            # Of one version between two freezes, whatever name the caller knows it by.
            cache_salt=f"{call['cache_salt']}/{self._freezes}",
        )


def _log_probs(meta: dict[str, Any], count: int, *, masked: bool) -> list[float]:
    if masked:
        found = list(meta["output_token_sampling_logprobs"])
    else:
        found = [row[0] for row in meta["output_token_logprobs"]]
    if len(found) != count:
        raise Failed(f"{count} tokens came with {len(found)} log-probs")
    return found


def _check_finish(reason: Any) -> None:
    if isinstance(reason, dict) and reason.get("type") == "abort" and reason.get("status_code"):
        raise Failed(str(reason.get("message")))

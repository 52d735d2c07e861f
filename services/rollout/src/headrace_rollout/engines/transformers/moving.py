"""Rows that move between engines with the same weights: their keys and values as bytes, and back."""

from __future__ import annotations

from contextlib import suppress

from headrace_rollout.engines.base import CachedContext, Policy
from headrace_rollout.engines.transformers.cache import SlotCache
from headrace_rollout.engines.transformers.waiting import Waiting


def leave(cache: SlotCache, policy: Policy, row: int, length: int) -> CachedContext:
    """What a row of `length` tokens has, for another engine."""
    return CachedContext(_form(cache, policy), length, cache.copy_out(row, length))


def take(cache: SlotCache, policy: Policy, waiting: Waiting) -> None:
    """Gives a context the keys that another engine has left of it; others than the weights' own are not used."""
    given = waiting.members[0].cache
    if given is None or given.form != _form(cache, policy):
        return
    if given.tokens == len(waiting.context_ids) - 1:  # The newest token goes in with the next round.
        with suppress(ValueError):
            waiting.keys = cache.keys_of(given.data, given.tokens)


def _form(cache: SlotCache, policy: Policy) -> str:
    return f"{cache.form}, {policy.digest}"

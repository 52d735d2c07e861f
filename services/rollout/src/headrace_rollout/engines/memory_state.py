"""Where an engine's memory stands between Suspend and Wake. Knows no engine."""

from __future__ import annotations

from enum import Enum

from headrace_rollout.engines.base import Refused, Scope


class MemoryState(Enum):
    """COLD: nothing was taken yet. SUSPENDED: released. WEIGHTS: room for weights alone. AWAKE: all."""

    COLD = "cold"
    SUSPENDED = "suspended"
    WEIGHTS = "weights"
    AWAKE = "awake"

    def to_take(self, scope: Scope, *, installed: bool) -> list[Scope]:
        """What a Wake of `scope` has to take, in order. Refused where the order is wrong."""
        if self in (MemoryState.COLD, MemoryState.AWAKE):
            return []
        if self is MemoryState.SUSPENDED:
            if scope is Scope.KV_CACHE:
                raise Refused("SUSPENDED", "the weights have no room yet; Wake WEIGHTS and install first")
            return [Scope.WEIGHTS] if scope is Scope.WEIGHTS else [Scope.WEIGHTS, Scope.KV_CACHE]
        if scope is Scope.WEIGHTS:
            return []
        if scope is Scope.KV_CACHE and not installed:
            raise Refused("POLICY_MISMATCH", "install a policy before Wake KV_CACHE")
        return [Scope.KV_CACHE]

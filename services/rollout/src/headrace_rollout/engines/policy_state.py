"""What an engine's version and memory allow: rules that all engines share. Knows no engine."""

from __future__ import annotations

from enum import Enum

from headrace_rollout.engines.base import Policy, Refused, Scope


class MemoryState(Enum):
    """COLD: nothing was taken yet. SUSPENDED: released. WEIGHTS: room for weights alone. AWAKE: all."""

    COLD = "cold"
    SUSPENDED = "suspended"
    WEIGHTS = "weights"
    AWAKE = "awake"

    def check_resume(self) -> None:
        """Raises Refused SUSPENDED where memory was released."""
        if self in (MemoryState.SUSPENDED, MemoryState.WEIGHTS):
            raise Refused("SUSPENDED", "the engine's memory is released; Wake WEIGHTS and KV_CACHE first")

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


def require_installed(installed: Policy | None, number: int | None, oldest: int | None = None) -> Policy:
    """The installed policy. Raises Refused POLICY_MISMATCH unless it is version `number` (None: any).

    With `oldest`, it may also have taken over the streams of the versions from that one on.
    """
    if installed is not None:
        first = installed.number if oldest is None else oldest
        if number is None or first <= number <= installed.number:
            return installed
    wanted = "a policy" if number is None else f"version {number}"
    have = "none" if installed is None else str(installed.number)
    raise Refused("POLICY_MISMATCH", f"{wanted} is wanted and {have} is installed; install it first")


def is_installed(
    policy: Policy, installed: Policy | None, memory: MemoryState, living: int, *, in_flight: bool
) -> bool:
    """Whether the weights of `policy` are installed already, perhaps under a lower number.

    Where they are not, Refused says why they cannot be installed now: POLICY_MISMATCH, SUSPENDED.
    """
    if memory is MemoryState.SUSPENDED:
        raise Refused("SUSPENDED", "the weights have no room; Wake WEIGHTS first")
    if installed == policy:
        return True
    if installed is not None and policy.number <= installed.number and not policy.any_order:
        raise Refused(
            "POLICY_MISMATCH",
            f"version {policy.number} does not follow version {installed.number}, which is installed",
        )
    if living and not in_flight:
        raise Refused("POLICY_MISMATCH", f"{living} samples of the installed version live; pause first")
    return installed is not None and installed.digest == policy.digest

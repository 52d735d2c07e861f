"""Service kinds by the names that people use."""

from __future__ import annotations

from headrace.coordinator.v1 import fleet_pb2

KINDS: dict[str, fleet_pb2.ServiceKind] = {
    "rollout": fleet_pb2.SERVICE_KIND_ROLLOUT,
    "trainer": fleet_pb2.SERVICE_KIND_TRAINER,
    "simulator": fleet_pb2.SERVICE_KIND_SIMULATOR,
    "reward": fleet_pb2.SERVICE_KIND_REWARD,
}


def kind_name(kind: int) -> str:
    """The name of a kind, or empty for an unknown one."""
    return next((name for name, number in KINDS.items() if number == kind), "")

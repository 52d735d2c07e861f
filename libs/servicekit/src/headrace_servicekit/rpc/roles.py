"""Who may call what between the services: one table of every RPC and the roles whose certificates it takes.

What has no row is denied. A certificate names its holder as spiffe://FLEET/ROLE/HOST; knows no service's code.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, NamedTuple

import grpc

from headrace_servicekit.rpc.errors import ServiceError

COORDINATOR, ROLLOUT, TRAINER, REWARD, SIMULATOR = "coordinator", "rollout", "trainer", "reward", "simulator"
SUPERVISOR, SCALER = "supervisor", "scaler"
INSTANCES = (ROLLOUT, TRAINER, REWARD, SIMULATOR)
ROLES = (COORDINATOR, *INSTANCES, SUPERVISOR, SCALER)
JOINING = (SUPERVISOR, *INSTANCES)
"""Roles of a host that joins: nobody but the head's own launcher certifies a coordinator."""
ANY_HOST = "*"
"""In a certificate that several containers of one role share: it speaks for each of them."""
SCHEME = "spiffe://"


def _rows(service: str, methods: Mapping[str, Iterable[str]]) -> dict[str, frozenset[str]]:
    return {f"/headrace.{service}/{name}": frozenset(roles) for name, roles in methods.items()}


def _each(names: str, *roles: str) -> dict[str, tuple[str, ...]]:
    return dict.fromkeys(names.split(), roles)


TABLE: Mapping[str, frozenset[str]] = {
    # An instance registers as its own role and host, a supervisor speaks of processes of its own host: `FleetServicer`.
    **_rows("coordinator.v1.FleetService", _each("Register Session Relay", *INSTANCES)),
    # In a container the supervisor of an instance has the instance's certificate.
    **_rows("coordinator.v1.FleetService", _each("Supervise", SUPERVISOR, SCALER, *INSTANCES)),
    **_rows(
        "trainer.v1.TrainerService",
        _each(
            "OpenRun CloseRun JoinTrainerGroup LeaveTrainerGroup Restore BeginStep Learn ComputeLoss CommitStep "
            "RecordStep AbortStep GetStepState Infer PublishPolicy SaveCheckpoint ListCheckpoints FetchLedger "
            "ExportModel Help TakeContribution AddContribution Suspend Wake",
            COORDINATOR,
        ),
    ),
    **_rows(
        "rollout.v1.RolloutService",
        _each(
            "OpenRun CloseRun Generate RunEpisodes Score InstallPolicy Pause Resume Abort Suspend Wake ListInventory "
            "FetchTrajectories ReleaseTrajectories",
            COORDINATOR,
        ),
    ),
    **_rows("rollout.v1.RolloutService", _each("Follow", ROLLOUT)),
    **_rows("simulator.v1.SimulatorService", _each("ListEnvironments OpenPool ClosePool", COORDINATOR)),
    **_rows("simulator.v1.SimulatorService", _each("Step StepLocally Render", ROLLOUT)),
    **_rows("reward.v1.RewardService", _each("ListScorers OpenRun CloseRun Score", COORDINATOR)),
    # Rollouts fetch versions from trainers and from one another; trainers what helpers have contributed.
    **_rows(
        "common.v1.WeightService",
        _each("GetManifest FetchWeights JoinBroadcast ShareDeviceMemory", ROLLOUT, TRAINER),
    ),
    **_rows("common.v1.BlobService", _each("FetchBlob", ROLLOUT, TRAINER, REWARD)),
    "/grpc.health.v1.Health/Check": frozenset(ROLES),
    "/grpc.health.v1.Health/Watch": frozenset(ROLES),
    "/grpc.health.v1.Health/List": frozenset(ROLES),
    "/grpc.reflection.v1alpha.ServerReflection/ServerReflectionInfo": frozenset({SUPERVISOR}),
}


class Identity(NamedTuple):
    """Whom a certificate is for."""

    fleet: str
    role: str
    host: str

    @property
    def uri(self) -> str:
        """As it stands in the certificate."""
        return f"{SCHEME}{self.fleet}/{self.role}/{self.host}"

    def is_at(self, host: str) -> bool:
        """Whether it speaks for a host."""
        return self.host in (host, ANY_HOST)


def identity(names: Iterable[str]) -> Identity | None:
    """What the only SPIFFE id among the names of a certificate says; None where there is none, or several."""
    found = [name.removeprefix(SCHEME).split("/") for name in names if name.startswith(SCHEME)]
    if len(found) != 1 or len(found[0]) != 3 or not all(found[0]) or found[0][1] not in ROLES:
        return None
    return Identity(*found[0])


def caller(context: Any) -> Identity | None:
    """Who calls, by the certificate that the handshake has proven; None where nothing is encrypted."""
    proven = context.auth_context()
    return identity(name.decode(errors="replace") for name in proven.get("x509_subject_alternative_name", ()))


def check(method: str, known: Identity | None, fleet: str) -> None:
    """Raises ServiceError PERMISSION_DENIED unless the table lets the role of this fleet call the method."""
    if known is None or known.fleet != fleet:
        who = known.uri if known else f"one that names no {SCHEME}FLEET/ROLE/HOST"
        raise denied(f"this server takes certificates of fleet {fleet!r}; the caller has {who}")
    if known.role not in TABLE.get(method, ()):
        allowed = ", ".join(sorted(TABLE.get(method, ()))) or "nobody"
        raise denied(f"{method} is for {allowed}; the caller's certificate is that of {known.uri}")


def denied(message: str) -> ServiceError:
    """The refusal of a caller who is known, and may not."""
    return ServiceError(grpc.StatusCode.PERMISSION_DENIED, "PERMISSION_DENIED", message)

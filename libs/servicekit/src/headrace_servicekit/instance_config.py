"""The settings of every instance, from flags or from HEADRACE_ variables."""

from __future__ import annotations

import argparse
import os
import secrets
import socket
import stat
import sys
import tempfile
import uuid
from collections.abc import Sequence
from pathlib import Path
from typing import Literal

import grpc
from headrace.coordinator.v1 import fleet_pb2
from pydantic import BaseModel, ConfigDict, Field, ValidationError, field_validator, model_validator

from headrace_servicekit.lease.devices import detect_devices, full_names, own_part
from headrace_servicekit.problems import explain
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.tracing import check_endpoint

Kind = Literal["coordinator", "rollout", "trainer", "simulator", "reward"]
KINDS: dict[str, fleet_pb2.ServiceKind] = {
    "rollout": fleet_pb2.SERVICE_KIND_ROLLOUT,
    "trainer": fleet_pb2.SERVICE_KIND_TRAINER,
    "simulator": fleet_pb2.SERVICE_KIND_SIMULATOR,
    "reward": fleet_pb2.SERVICE_KIND_REWARD,
}
"""Service kinds of the contract by the names that people use."""


def kind_name(kind: int) -> str:
    """The name of a kind, or empty for an unknown one."""
    return next((name for name, number in KINDS.items() if number == kind), "")


def default_drain_grace_s(kind: str) -> float:
    """Seconds that an instance waits after SIGTERM for its runs to be closed: a trainer saves a checkpoint."""
    return 30.0 if kind == "trainer" else 10.0


def default_shm_dir() -> Path:
    """A directory of this user's on the host's shared memory, or on disk where there is none."""
    shared = Path("/dev/shm")
    return (shared if shared.is_dir() else Path(tempfile.gettempdir())) / f"headrace-{os.getuid()}"


class InstanceConfig(BaseModel):
    """One instance. `devices` hold full names, see `devices`; give them as "cpu:0", "gpu:0", or "auto"."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    kind: Kind
    name: str = Field("", description="stable name of the instance; default: KIND-0")
    incarnation: str = Field("", description="unique id of this process; default: a fresh one")
    host: str = Field("", description="name of the host; default: the host's name")
    coordinator: str = Field(
        "", description="host:port of the coordinator; empty: stand-alone, without a session"
    )
    listen: str = Field("127.0.0.1:0", description="host:port to listen on; port 0 picks a free one")
    advertise: str = Field("", description="host that others reach this instance at; default: from --listen")
    outgoing: bool = Field(
        False,
        description="nobody reaches this instance: callers come through a connection that it opens to the coordinator",
    )
    devices: tuple[str, ...] = Field((), description="devices to lease out, comma-separated, or 'auto'")
    index: int = Field(
        0, ge=0, description="number among this host's instances of its kind: says which MIG device it has"
    )
    token_file: Path | None = Field(None, description="file with the bearer token that the fleet shares")
    shm_dir: Path = Field(
        default_factory=default_shm_dir, description="directory on a tmpfs for published weights"
    )
    data_dir: Path = Field(Path("headrace-data"), description="directory for what must survive")
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="least level that is logged"
    )
    reflection: bool = Field(False, description="offer gRPC reflection")
    metrics_port: int | None = Field(
        None, ge=0, le=65535, description="port of the Prometheus figures; default: none"
    )

    otlp_endpoint: str = Field(
        "", description="OTLP collector of traces, http://HOST:PORT; empty: no traces (extra `tracing`)"
    )
    drain_grace_s: float = Field(
        10.0,
        ge=0,
        description="seconds after SIGTERM in which the coordinator may close the open runs; "
        "default: 30 for a trainer, else 10",
    )

    @field_validator("devices", mode="before")
    @classmethod
    def _split_devices(cls, value: object) -> object:
        if isinstance(value, str):
            value = [part.strip() for part in value.split(",") if part.strip()]
        return detect_devices() if value in (["auto"], ("auto",)) else value

    @field_validator("otlp_endpoint")
    @classmethod
    def _endpoint(cls, value: str) -> str:
        return check_endpoint(value)

    @model_validator(mode="before")
    @classmethod
    def _defaults(cls, data: object) -> object:
        if not isinstance(data, dict):
            return data
        filled = {key: value for key, value in data.items() if value is not None}
        filled["name"] = filled.get("name") or f"{filled.get('kind', 'instance')}-0"
        filled["incarnation"] = filled.get("incarnation") or uuid.uuid4().hex
        filled["host"] = filled.get("host") or socket.gethostname()
        filled.setdefault("drain_grace_s", default_drain_grace_s(str(filled.get("kind"))))
        return filled

    @model_validator(mode="after")
    def _name_devices(self) -> InstanceConfig:
        try:
            named = tuple(full_names(self.devices))
        except ServiceError as error:
            raise ValueError(f"devices: {error.message}") from error
        own = own_part(named, self.index, from_end=self.kind == "trainer")
        object.__setattr__(self, "devices", tuple(own))
        return self

    def read_token(self) -> str | None:
        """The bearer token, or None without a token file; see `read_token`."""
        return read_token(self.token_file)


def make_token(path: Path) -> Path:
    """Writes a new secret to `path`, readable by its owner alone; an existing secret stays. Raises OSError."""
    try:
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError:
        path.chmod(0o600)
        return path
    with os.fdopen(descriptor, "w", encoding="ascii") as file:
        file.write(secrets.token_urlsafe(32))
    return path


def open_to_others(path: Path) -> str:
    """Why a file with a secret is not one: other users can read or change it, with the fix; else empty.

    A group is let be where the file is another user's or root's: volumes of Kubernetes give secrets to a pod's group.
    Raises OSError.
    """
    found = path.stat()
    shut = 0o077 if found.st_uid == os.geteuid() != 0 else 0o007
    if not found.st_mode & shut:
        return ""
    mode = stat.S_IMODE(found.st_mode)
    return f"{path} holds a secret and is open to other users (mode {mode:04o}): chmod 600 {path}"


def read_token(path: Path | None) -> str | None:
    """The token in a file. Raises ServiceError TOKEN_FILE when it cannot be read, is empty or open to other users."""
    if path is None:
        return None
    try:
        if wide := open_to_others(path):
            raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "TOKEN_FILE", f"token file {wide}")
        token = path.read_text().strip()
    except OSError as error:
        raise ServiceError(
            grpc.StatusCode.FAILED_PRECONDITION, "TOKEN_FILE", f"token file {path}: {error.strerror}"
        ) from error
    if not token:
        raise ServiceError(grpc.StatusCode.FAILED_PRECONDITION, "TOKEN_FILE", f"token file {path} is empty")
    return token


def parse_instance_config(kind: str, argv: Sequence[str] | None = None) -> InstanceConfig:
    """Reads flags, then HEADRACE_ variables, then defaults. Exits with status 2 on an error."""
    parser = argparse.ArgumentParser(
        prog=f"headrace-{kind}", description=f"Runs one {kind} instance of Headrace."
    )
    for name, info in InstanceConfig.model_fields.items():
        if name == "kind":
            continue
        variable = _variable(name)
        action = argparse.BooleanOptionalAction if info.annotation is bool else "store"
        parser.add_argument(_flag(name), action=action, default=None, help=f"{info.description} ({variable})")  # type: ignore[arg-type]
    given = vars(parser.parse_args(argv))
    values = {
        name: value if value is not None else os.environ.get(_variable(name)) for name, value in given.items()
    }
    try:
        return InstanceConfig.model_validate({"kind": kind, **values})
    except ValidationError as error:
        for problem in explain(error, InstanceConfig):
            print(
                f"{parser.prog}: {_flag(problem.key)} ({_variable(problem.key)}): {problem}", file=sys.stderr
            )
        raise SystemExit(2) from error


def _flag(name: str) -> str:
    return "--" + name.replace("_", "-")


def _variable(name: str) -> str:
    return "HEADRACE_" + name.upper()

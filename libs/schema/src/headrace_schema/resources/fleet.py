"""The fleet as people see it: instances, leases, devices, health, drains and scaling."""

from __future__ import annotations

from pydantic import Field

from headrace_schema.resources.resource import Resource


class GpuUseView(Resource):
    """How busy a GPU is, whoever uses it."""

    device: str
    busy: float = Field(description="share of time in which it computed, from 0 to 1")
    used_memory_bytes: int


class InstanceView(Resource):
    """One running process of a service."""

    name: str
    incarnation: str
    kind: str
    state: str = Field(description="READY, SILENT (heartbeats are missing), LOST or DRAINING")
    host: str
    address: str
    devices: list[str]
    capabilities: dict[str, list[str]]
    run: str
    resident_memory_bytes: int = Field(description="of the process, without its children")
    busy_cores: float = Field(
        default=0.0,
        description="cores that it and its children kept busy since the heartbeat before the last",
    )
    gpus: list[GpuUseView] = Field(default=[], description="use of the GPUs that it holds, where known")
    last_heartbeat_age_s: float
    silent_for_s: float = Field(
        default=0.0, description="seconds without a sign of life, once two heartbeats are missing"
    )


class HealthView(Resource):
    """How the coordinator is; served with 503 when it is unhealthy."""

    status: str = Field(description="ok or unhealthy")
    reason: str = Field(default="", description="what is wrong, or what the store had lost; empty: nothing")
    store_writable: bool = Field(default=True, description="the store took the last write")
    loop_lag_ms: float = Field(default=0.0, description="largest delay of the event loop in the last 10 s")
    tasks: dict[str, bool] = Field(default={}, description="the lasting tasks, and whether each lives")
    coordinator_epoch: int = Field(default=0, description="epoch of this coordinator")
    version: str = Field(default="", description="of the coordinator's package")
    time: float = Field(default=0.0, description="the coordinator's clock, in seconds since the epoch")
    grpc_port: int = Field(default=0, description="where instances register, at the same address")
    login: bool = Field(default=False, description="GET /login leads to an issuer that browsers log in at")


class ServiceView(Resource):
    """How many instances of a kind there are and could be used, and who sets their number."""

    kind: str
    instances: int = Field(description="that are registered and not draining")
    wanted: int = Field(description="what the runs of now could use, those that wait included")
    least: int | None = Field(default=None, description="bounds of the autoscaling policy; null: it is off")
    most: int | None = None
    asked: int | None = Field(default=None, description="what the policy asked for last")
    problem: str = Field(default="", description="why the last change was refused; empty: it was not")


class ServiceListView(Resource):
    """The services whose number of instances can be changed."""

    services: list[ServiceView]


class InstanceListView(Resource):
    """Instances."""

    instances: list[InstanceView]
    next_page_token: str = ""


class LeaseView(Resource):
    """One lease."""

    epoch: int
    state: str = Field(description="GRANTED, HELD or REVOKING")
    instance: str
    run: str
    stage: str
    devices: list[str]
    memory_part: float = Field(default=1.0, description="of each device's memory; below 1 in a joint lease")
    expires_in_s: float
    since: float = Field(default=0.0, description="when it was granted, in seconds since the epoch")


class DeviceView(Resource):
    """One device."""

    name: str
    state: str = Field(description="FREE, LEASED or QUARANTINED")
    holder: str
    reason: str


class LeaseListView(Resource):
    """Leases and devices."""

    leases: list[LeaseView]
    devices: list[DeviceView]
    next_page_token: str = ""


class DrainView(Resource):
    """An instance that was told to drain: it gets no new work, hands over what it holds, and ends."""

    instance: str
    incarnation: str = Field(description="the process that ends; one that replaces it has another")


class DeviceReleaseView(Resource):
    """A device that left quarantine by a person's word."""

    device: str


class ScaleView(Resource):
    """The wanted number of processes of a kind."""

    kind: str
    count: int

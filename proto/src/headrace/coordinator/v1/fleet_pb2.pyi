import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from headrace.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class ServiceKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SERVICE_KIND_UNSPECIFIED: _ClassVar[ServiceKind]
    SERVICE_KIND_ROLLOUT: _ClassVar[ServiceKind]
    SERVICE_KIND_TRAINER: _ClassVar[ServiceKind]
    SERVICE_KIND_SIMULATOR: _ClassVar[ServiceKind]
    SERVICE_KIND_REWARD: _ClassVar[ServiceKind]
SERVICE_KIND_UNSPECIFIED: ServiceKind
SERVICE_KIND_ROLLOUT: ServiceKind
SERVICE_KIND_TRAINER: ServiceKind
SERVICE_KIND_SIMULATOR: ServiceKind
SERVICE_KIND_REWARD: ServiceKind

class StringList(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, values: _Optional[_Iterable[str]] = ...) -> None: ...

class RegisterRequest(_message.Message):
    __slots__ = ("instance", "incarnation", "kind", "address", "host", "devices", "capabilities", "profile", "held_leases", "coordinator_epoch", "open_runs", "store_id", "open_run_reports", "max_open_runs", "boot_id")
    class CapabilitiesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: StringList
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[StringList, _Mapping]] = ...) -> None: ...
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    CAPABILITIES_FIELD_NUMBER: _ClassVar[int]
    PROFILE_FIELD_NUMBER: _ClassVar[int]
    HELD_LEASES_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_RUNS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    OPEN_RUN_REPORTS_FIELD_NUMBER: _ClassVar[int]
    MAX_OPEN_RUNS_FIELD_NUMBER: _ClassVar[int]
    BOOT_ID_FIELD_NUMBER: _ClassVar[int]
    instance: str
    incarnation: str
    kind: ServiceKind
    address: str
    host: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    capabilities: _containers.MessageMap[str, StringList]
    profile: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageMetrics]
    held_leases: _containers.RepeatedCompositeFieldContainer[_common_pb2.Lease]
    coordinator_epoch: int
    open_runs: _containers.RepeatedScalarFieldContainer[str]
    store_id: str
    open_run_reports: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenRunReport]
    max_open_runs: int
    boot_id: str
    def __init__(self, instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., kind: _Optional[_Union[ServiceKind, str]] = ..., address: _Optional[str] = ..., host: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., capabilities: _Optional[_Mapping[str, StringList]] = ..., profile: _Optional[_Iterable[_Union[_common_pb2.StageMetrics, _Mapping]]] = ..., held_leases: _Optional[_Iterable[_Union[_common_pb2.Lease, _Mapping]]] = ..., coordinator_epoch: _Optional[int] = ..., open_runs: _Optional[_Iterable[str]] = ..., store_id: _Optional[str] = ..., open_run_reports: _Optional[_Iterable[_Union[_common_pb2.OpenRunReport, _Mapping]]] = ..., max_open_runs: _Optional[int] = ..., boot_id: _Optional[str] = ...) -> None: ...

class RegisterResponse(_message.Message):
    __slots__ = ("coordinator_epoch", "heartbeat_interval", "lease_ttl", "stale_lease_epochs", "store_id")
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_INTERVAL_FIELD_NUMBER: _ClassVar[int]
    LEASE_TTL_FIELD_NUMBER: _ClassVar[int]
    STALE_LEASE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    coordinator_epoch: int
    heartbeat_interval: _duration_pb2.Duration
    lease_ttl: _duration_pb2.Duration
    stale_lease_epochs: _containers.RepeatedScalarFieldContainer[int]
    store_id: str
    def __init__(self, coordinator_epoch: _Optional[int] = ..., heartbeat_interval: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lease_ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., stale_lease_epochs: _Optional[_Iterable[int]] = ..., store_id: _Optional[str] = ...) -> None: ...

class SessionRequest(_message.Message):
    __slots__ = ("incarnation", "heartbeat", "lease_held", "lease_released", "draining")
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    HEARTBEAT_FIELD_NUMBER: _ClassVar[int]
    LEASE_HELD_FIELD_NUMBER: _ClassVar[int]
    LEASE_RELEASED_FIELD_NUMBER: _ClassVar[int]
    DRAINING_FIELD_NUMBER: _ClassVar[int]
    incarnation: str
    heartbeat: Heartbeat
    lease_held: LeaseHeld
    lease_released: LeaseReleased
    draining: Draining
    def __init__(self, incarnation: _Optional[str] = ..., heartbeat: _Optional[_Union[Heartbeat, _Mapping]] = ..., lease_held: _Optional[_Union[LeaseHeld, _Mapping]] = ..., lease_released: _Optional[_Union[LeaseReleased, _Mapping]] = ..., draining: _Optional[_Union[Draining, _Mapping]] = ...) -> None: ...

class Heartbeat(_message.Message):
    __slots__ = ("sequence", "lease_epochs", "resident_memory_bytes", "metrics", "open_runs", "lost_peers", "busy_cores", "gpus", "progress")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    RESIDENT_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    OPEN_RUNS_FIELD_NUMBER: _ClassVar[int]
    LOST_PEERS_FIELD_NUMBER: _ClassVar[int]
    BUSY_CORES_FIELD_NUMBER: _ClassVar[int]
    GPUS_FIELD_NUMBER: _ClassVar[int]
    PROGRESS_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    lease_epochs: _containers.RepeatedScalarFieldContainer[int]
    resident_memory_bytes: int
    metrics: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageMetrics]
    open_runs: _containers.RepeatedCompositeFieldContainer[_common_pb2.OpenRunReport]
    lost_peers: _containers.RepeatedScalarFieldContainer[str]
    busy_cores: float
    gpus: _containers.RepeatedCompositeFieldContainer[GpuUse]
    progress: Progress
    def __init__(self, sequence: _Optional[int] = ..., lease_epochs: _Optional[_Iterable[int]] = ..., resident_memory_bytes: _Optional[int] = ..., metrics: _Optional[_Iterable[_Union[_common_pb2.StageMetrics, _Mapping]]] = ..., open_runs: _Optional[_Iterable[_Union[_common_pb2.OpenRunReport, _Mapping]]] = ..., lost_peers: _Optional[_Iterable[str]] = ..., busy_cores: _Optional[float] = ..., gpus: _Optional[_Iterable[_Union[GpuUse, _Mapping]]] = ..., progress: _Optional[_Union[Progress, _Mapping]] = ...) -> None: ...

class Progress(_message.Message):
    __slots__ = ("done", "total", "unit", "note")
    DONE_FIELD_NUMBER: _ClassVar[int]
    TOTAL_FIELD_NUMBER: _ClassVar[int]
    UNIT_FIELD_NUMBER: _ClassVar[int]
    NOTE_FIELD_NUMBER: _ClassVar[int]
    done: int
    total: int
    unit: str
    note: str
    def __init__(self, done: _Optional[int] = ..., total: _Optional[int] = ..., unit: _Optional[str] = ..., note: _Optional[str] = ...) -> None: ...

class GpuUse(_message.Message):
    __slots__ = ("device", "busy", "used_memory_bytes")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    BUSY_FIELD_NUMBER: _ClassVar[int]
    USED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    device: str
    busy: float
    used_memory_bytes: int
    def __init__(self, device: _Optional[str] = ..., busy: _Optional[float] = ..., used_memory_bytes: _Optional[int] = ...) -> None: ...

class Draining(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class LeaseHeld(_message.Message):
    __slots__ = ("epoch", "refusal")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    REFUSAL_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    refusal: str
    def __init__(self, epoch: _Optional[int] = ..., refusal: _Optional[str] = ...) -> None: ...

class LeaseReleased(_message.Message):
    __slots__ = ("epoch", "free_memory_bytes", "used_memory_bytes")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    USED_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    free_memory_bytes: int
    used_memory_bytes: int
    def __init__(self, epoch: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ..., used_memory_bytes: _Optional[int] = ...) -> None: ...

class SessionResponse(_message.Message):
    __slots__ = ("heartbeat_ack", "grant", "revoke", "drain")
    HEARTBEAT_ACK_FIELD_NUMBER: _ClassVar[int]
    GRANT_FIELD_NUMBER: _ClassVar[int]
    REVOKE_FIELD_NUMBER: _ClassVar[int]
    DRAIN_FIELD_NUMBER: _ClassVar[int]
    heartbeat_ack: HeartbeatAck
    grant: Grant
    revoke: Revoke
    drain: Drain
    def __init__(self, heartbeat_ack: _Optional[_Union[HeartbeatAck, _Mapping]] = ..., grant: _Optional[_Union[Grant, _Mapping]] = ..., revoke: _Optional[_Union[Revoke, _Mapping]] = ..., drain: _Optional[_Union[Drain, _Mapping]] = ...) -> None: ...

class HeartbeatAck(_message.Message):
    __slots__ = ("sequence", "renewed_epochs", "stale_epochs", "measured_devices")
    SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    RENEWED_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    STALE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    MEASURED_DEVICES_FIELD_NUMBER: _ClassVar[int]
    sequence: int
    renewed_epochs: _containers.RepeatedScalarFieldContainer[int]
    stale_epochs: _containers.RepeatedScalarFieldContainer[int]
    measured_devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, sequence: _Optional[int] = ..., renewed_epochs: _Optional[_Iterable[int]] = ..., stale_epochs: _Optional[_Iterable[int]] = ..., measured_devices: _Optional[_Iterable[str]] = ...) -> None: ...

class Grant(_message.Message):
    __slots__ = ("lease",)
    LEASE_FIELD_NUMBER: _ClassVar[int]
    lease: _common_pb2.Lease
    def __init__(self, lease: _Optional[_Union[_common_pb2.Lease, _Mapping]] = ...) -> None: ...

class Revoke(_message.Message):
    __slots__ = ("epoch", "notice", "keep_memory")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    NOTICE_FIELD_NUMBER: _ClassVar[int]
    KEEP_MEMORY_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    notice: _duration_pb2.Duration
    keep_memory: bool
    def __init__(self, epoch: _Optional[int] = ..., notice: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., keep_memory: _Optional[bool] = ...) -> None: ...

class Drain(_message.Message):
    __slots__ = ("grace",)
    GRACE_FIELD_NUMBER: _ClassVar[int]
    grace: _duration_pb2.Duration
    def __init__(self, grace: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SuperviseRequest(_message.Message):
    __slots__ = ("host", "processes", "exit", "scale_result", "hosts_gone")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    EXIT_FIELD_NUMBER: _ClassVar[int]
    SCALE_RESULT_FIELD_NUMBER: _ClassVar[int]
    HOSTS_GONE_FIELD_NUMBER: _ClassVar[int]
    host: str
    processes: ProcessTable
    exit: ProcessExit
    scale_result: ScaleResult
    hosts_gone: HostsGone
    def __init__(self, host: _Optional[str] = ..., processes: _Optional[_Union[ProcessTable, _Mapping]] = ..., exit: _Optional[_Union[ProcessExit, _Mapping]] = ..., scale_result: _Optional[_Union[ScaleResult, _Mapping]] = ..., hosts_gone: _Optional[_Union[HostsGone, _Mapping]] = ...) -> None: ...

class ProcessTable(_message.Message):
    __slots__ = ("processes", "scalable_kinds")
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    SCALABLE_KINDS_FIELD_NUMBER: _ClassVar[int]
    processes: _containers.RepeatedCompositeFieldContainer[SupervisedProcess]
    scalable_kinds: _containers.RepeatedScalarFieldContainer[ServiceKind]
    def __init__(self, processes: _Optional[_Iterable[_Union[SupervisedProcess, _Mapping]]] = ..., scalable_kinds: _Optional[_Iterable[_Union[ServiceKind, str]]] = ...) -> None: ...

class HostsGone(_message.Message):
    __slots__ = ("hosts",)
    HOSTS_FIELD_NUMBER: _ClassVar[int]
    hosts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, hosts: _Optional[_Iterable[str]] = ...) -> None: ...

class SupervisedProcess(_message.Message):
    __slots__ = ("instance", "incarnation", "kind", "pid")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    PID_FIELD_NUMBER: _ClassVar[int]
    instance: str
    incarnation: str
    kind: ServiceKind
    pid: int
    def __init__(self, instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., kind: _Optional[_Union[ServiceKind, str]] = ..., pid: _Optional[int] = ...) -> None: ...

class ProcessExit(_message.Message):
    __slots__ = ("instance", "incarnation", "exit_status", "last_words")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    EXIT_STATUS_FIELD_NUMBER: _ClassVar[int]
    LAST_WORDS_FIELD_NUMBER: _ClassVar[int]
    instance: str
    incarnation: str
    exit_status: int
    last_words: str
    def __init__(self, instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., exit_status: _Optional[int] = ..., last_words: _Optional[str] = ...) -> None: ...

class ScaleResult(_message.Message):
    __slots__ = ("request_id", "kind", "count", "error")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    ERROR_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: ServiceKind
    count: int
    error: str
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[_Union[ServiceKind, str]] = ..., count: _Optional[int] = ..., error: _Optional[str] = ...) -> None: ...

class SuperviseResponse(_message.Message):
    __slots__ = ("scale", "kill")
    SCALE_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    scale: Scale
    kill: Kill
    def __init__(self, scale: _Optional[_Union[Scale, _Mapping]] = ..., kill: _Optional[_Union[Kill, _Mapping]] = ...) -> None: ...

class Scale(_message.Message):
    __slots__ = ("request_id", "kind", "count")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    kind: ServiceKind
    count: int
    def __init__(self, request_id: _Optional[str] = ..., kind: _Optional[_Union[ServiceKind, str]] = ..., count: _Optional[int] = ...) -> None: ...

class Kill(_message.Message):
    __slots__ = ("instance", "incarnation", "reason")
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    instance: str
    incarnation: str
    reason: str
    def __init__(self, instance: _Optional[str] = ..., incarnation: _Optional[str] = ..., reason: _Optional[str] = ...) -> None: ...

class RelayRequest(_message.Message):
    __slots__ = ("address", "connection", "data", "ended")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    address: str
    connection: int
    data: bytes
    ended: bool
    def __init__(self, address: _Optional[str] = ..., connection: _Optional[int] = ..., data: _Optional[bytes] = ..., ended: _Optional[bool] = ...) -> None: ...

class RelayResponse(_message.Message):
    __slots__ = ("address", "connection", "data", "ended")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    CONNECTION_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    address: str
    connection: int
    data: bytes
    ended: bool
    def __init__(self, address: _Optional[str] = ..., connection: _Optional[int] = ..., data: _Optional[bytes] = ..., ended: _Optional[bool] = ...) -> None: ...

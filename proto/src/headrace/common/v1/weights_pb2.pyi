from headrace.common.v1 import common_pb2 as _common_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class GetManifestRequest(_message.Message):
    __slots__ = ("run", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class GetManifestResponse(_message.Message):
    __slots__ = ("version", "manifest", "source")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    manifest: _common_pb2.WeightManifest
    source: _common_pb2.WeightSource
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.WeightSource, _Mapping]] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("run", "number", "offset_bytes", "relay", "held", "base_digest")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    offset_bytes: int
    relay: bool
    held: _containers.RepeatedScalarFieldContainer[int]
    base_digest: str
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., relay: _Optional[bool] = ..., held: _Optional[_Iterable[int]] = ..., base_digest: _Optional[str] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("offset_bytes", "data", "changes")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    CHANGES_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    changes: _containers.RepeatedCompositeFieldContainer[WeightChange]
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ..., changes: _Optional[_Iterable[_Union[WeightChange, _Mapping]]] = ...) -> None: ...

class WeightChange(_message.Message):
    __slots__ = ("offset_bytes", "size_bytes", "changed", "gaps", "large_gaps", "moves", "large_moves", "whole")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    CHANGED_FIELD_NUMBER: _ClassVar[int]
    GAPS_FIELD_NUMBER: _ClassVar[int]
    LARGE_GAPS_FIELD_NUMBER: _ClassVar[int]
    MOVES_FIELD_NUMBER: _ClassVar[int]
    LARGE_MOVES_FIELD_NUMBER: _ClassVar[int]
    WHOLE_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    size_bytes: int
    changed: int
    gaps: bytes
    large_gaps: bytes
    moves: bytes
    large_moves: bytes
    whole: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ..., changed: _Optional[int] = ..., gaps: _Optional[bytes] = ..., large_gaps: _Optional[bytes] = ..., moves: _Optional[bytes] = ..., large_moves: _Optional[bytes] = ..., whole: _Optional[bytes] = ...) -> None: ...

class JoinBroadcastRequest(_message.Message):
    __slots__ = ("run", "number", "host", "device", "receivers", "base_digest", "held")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    HOST_FIELD_NUMBER: _ClassVar[int]
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    host: str
    device: str
    receivers: int
    base_digest: str
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ..., host: _Optional[str] = ..., device: _Optional[str] = ..., receivers: _Optional[int] = ..., base_digest: _Optional[str] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class JoinBroadcastResponse(_message.Message):
    __slots__ = ("host", "port", "key", "rank", "size", "backend", "base_digest", "held")
    HOST_FIELD_NUMBER: _ClassVar[int]
    PORT_FIELD_NUMBER: _ClassVar[int]
    KEY_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    SIZE_FIELD_NUMBER: _ClassVar[int]
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    BASE_DIGEST_FIELD_NUMBER: _ClassVar[int]
    HELD_FIELD_NUMBER: _ClassVar[int]
    host: str
    port: int
    key: str
    rank: int
    size: int
    backend: str
    base_digest: str
    held: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, host: _Optional[str] = ..., port: _Optional[int] = ..., key: _Optional[str] = ..., rank: _Optional[int] = ..., size: _Optional[int] = ..., backend: _Optional[str] = ..., base_digest: _Optional[str] = ..., held: _Optional[_Iterable[int]] = ...) -> None: ...

class ShareDeviceMemoryRequest(_message.Message):
    __slots__ = ("run", "number")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ...) -> None: ...

class ShareDeviceMemoryResponse(_message.Message):
    __slots__ = ("device", "handle", "storage_bytes", "storage_offset_bytes", "counter_handle", "counter_offset", "event_handle", "event_sync", "sums")
    DEVICE_FIELD_NUMBER: _ClassVar[int]
    HANDLE_FIELD_NUMBER: _ClassVar[int]
    STORAGE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORAGE_OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    COUNTER_HANDLE_FIELD_NUMBER: _ClassVar[int]
    COUNTER_OFFSET_FIELD_NUMBER: _ClassVar[int]
    EVENT_HANDLE_FIELD_NUMBER: _ClassVar[int]
    EVENT_SYNC_FIELD_NUMBER: _ClassVar[int]
    SUMS_FIELD_NUMBER: _ClassVar[int]
    device: str
    handle: bytes
    storage_bytes: int
    storage_offset_bytes: int
    counter_handle: bytes
    counter_offset: int
    event_handle: bytes
    event_sync: bool
    sums: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, device: _Optional[str] = ..., handle: _Optional[bytes] = ..., storage_bytes: _Optional[int] = ..., storage_offset_bytes: _Optional[int] = ..., counter_handle: _Optional[bytes] = ..., counter_offset: _Optional[int] = ..., event_handle: _Optional[bytes] = ..., event_sync: _Optional[bool] = ..., sums: _Optional[_Iterable[int]] = ...) -> None: ...

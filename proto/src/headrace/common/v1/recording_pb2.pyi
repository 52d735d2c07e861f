from google.protobuf.internal import containers as _containers
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class RecordingHeader(_message.Message):
    __slots__ = ("format", "headrace_version", "run", "step", "reason", "kept_at", "spec_json", "base", "instances", "incomplete")
    FORMAT_FIELD_NUMBER: _ClassVar[int]
    HEADRACE_VERSION_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    KEPT_AT_FIELD_NUMBER: _ClassVar[int]
    SPEC_JSON_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    INSTANCES_FIELD_NUMBER: _ClassVar[int]
    INCOMPLETE_FIELD_NUMBER: _ClassVar[int]
    format: int
    headrace_version: str
    run: str
    step: int
    reason: str
    kept_at: float
    spec_json: str
    base: RecordedBase
    instances: _containers.RepeatedCompositeFieldContainer[RecordedInstance]
    incomplete: str
    def __init__(self, format: _Optional[int] = ..., headrace_version: _Optional[str] = ..., run: _Optional[str] = ..., step: _Optional[int] = ..., reason: _Optional[str] = ..., kept_at: _Optional[float] = ..., spec_json: _Optional[str] = ..., base: _Optional[_Union[RecordedBase, _Mapping]] = ..., instances: _Optional[_Iterable[_Union[RecordedInstance, _Mapping]]] = ..., incomplete: _Optional[str] = ...) -> None: ...

class RecordedBase(_message.Message):
    __slots__ = ("checkpoint", "number", "digest")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    number: int
    digest: str
    def __init__(self, checkpoint: _Optional[str] = ..., number: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class RecordedInstance(_message.Message):
    __slots__ = ("kind", "name", "incarnation", "devices")
    KIND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    kind: str
    name: str
    incarnation: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, kind: _Optional[str] = ..., name: _Optional[str] = ..., incarnation: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ...) -> None: ...

class RecordedPart(_message.Message):
    __slots__ = ("call", "at", "header", "begun", "request", "response", "ended", "end")
    CALL_FIELD_NUMBER: _ClassVar[int]
    AT_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    BEGUN_FIELD_NUMBER: _ClassVar[int]
    REQUEST_FIELD_NUMBER: _ClassVar[int]
    RESPONSE_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    END_FIELD_NUMBER: _ClassVar[int]
    call: int
    at: float
    header: RecordingHeader
    begun: RecordedCall
    request: bytes
    response: bytes
    ended: RecordedEnd
    end: RecordingEnd
    def __init__(self, call: _Optional[int] = ..., at: _Optional[float] = ..., header: _Optional[_Union[RecordingHeader, _Mapping]] = ..., begun: _Optional[_Union[RecordedCall, _Mapping]] = ..., request: _Optional[bytes] = ..., response: _Optional[bytes] = ..., ended: _Optional[_Union[RecordedEnd, _Mapping]] = ..., end: _Optional[_Union[RecordingEnd, _Mapping]] = ...) -> None: ...

class RecordedCall(_message.Message):
    __slots__ = ("kind", "incarnation", "method", "step", "opening")
    KIND_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    METHOD_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    OPENING_FIELD_NUMBER: _ClassVar[int]
    kind: str
    incarnation: str
    method: str
    step: int
    opening: bytes
    def __init__(self, kind: _Optional[str] = ..., incarnation: _Optional[str] = ..., method: _Optional[str] = ..., step: _Optional[int] = ..., opening: _Optional[bytes] = ...) -> None: ...

class RecordedEnd(_message.Message):
    __slots__ = ("reason", "detail")
    REASON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    reason: str
    detail: str
    def __init__(self, reason: _Optional[str] = ..., detail: _Optional[str] = ...) -> None: ...

class RecordingEnd(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: int
    def __init__(self, parts: _Optional[int] = ...) -> None: ...

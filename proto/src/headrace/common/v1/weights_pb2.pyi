from headrace.common.v1 import common_pb2 as _common_pb2
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Mapping as _Mapping
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
    __slots__ = ("version", "manifest")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    manifest: _common_pb2.WeightManifest
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ...) -> None: ...

class FetchWeightsRequest(_message.Message):
    __slots__ = ("run", "number", "offset_bytes", "relay")
    RUN_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    run: str
    number: int
    offset_bytes: int
    relay: bool
    def __init__(self, run: _Optional[str] = ..., number: _Optional[int] = ..., offset_bytes: _Optional[int] = ..., relay: _Optional[bool] = ...) -> None: ...

class FetchWeightsResponse(_message.Message):
    __slots__ = ("offset_bytes", "data")
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    offset_bytes: int
    data: bytes
    def __init__(self, offset_bytes: _Optional[int] = ..., data: _Optional[bytes] = ...) -> None: ...

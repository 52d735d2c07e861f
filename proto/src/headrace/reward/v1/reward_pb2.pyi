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

class ScoreStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    SCORE_STATUS_UNSPECIFIED: _ClassVar[ScoreStatus]
    SCORE_STATUS_OK: _ClassVar[ScoreStatus]
    SCORE_STATUS_ANSWER_FAILED: _ClassVar[ScoreStatus]
    SCORE_STATUS_SCORER_BROKEN: _ClassVar[ScoreStatus]
    SCORE_STATUS_UNAVAILABLE: _ClassVar[ScoreStatus]
SCORE_STATUS_UNSPECIFIED: ScoreStatus
SCORE_STATUS_OK: ScoreStatus
SCORE_STATUS_ANSWER_FAILED: ScoreStatus
SCORE_STATUS_SCORER_BROKEN: ScoreStatus
SCORE_STATUS_UNAVAILABLE: ScoreStatus

class ListScorersRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListScorersResponse(_message.Message):
    __slots__ = ("scorers", "next_page_token")
    SCORERS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    scorers: _containers.RepeatedCompositeFieldContainer[Scorer]
    next_page_token: str
    def __init__(self, scorers: _Optional[_Iterable[_Union[Scorer, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Scorer(_message.Message):
    __slots__ = ("name", "description", "options_schema_json")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DESCRIPTION_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_SCHEMA_JSON_FIELD_NUMBER: _ClassVar[int]
    name: str
    description: str
    options_schema_json: str
    def __init__(self, name: _Optional[str] = ..., description: _Optional[str] = ..., options_schema_json: _Optional[str] = ...) -> None: ...

class OpenRunRequest(_message.Message):
    __slots__ = ("header", "config_json", "leased")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    config_json: str
    leased: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., config_json: _Optional[str] = ..., leased: _Optional[bool] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("scorer_digest",)
    SCORER_DIGEST_FIELD_NUMBER: _ClassVar[int]
    scorer_digest: str
    def __init__(self, scorer_digest: _Optional[str] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("header", "items")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    items: _containers.RepeatedCompositeFieldContainer[ScoreItem]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., items: _Optional[_Iterable[_Union[ScoreItem, _Mapping]]] = ...) -> None: ...

class ScoreItem(_message.Message):
    __slots__ = ("sample", "attempt", "prompt", "completion", "reference", "metadata_json", "finish_reason", "token_count", "evaluation", "stage", "messages", "conversation", "raw_prompt", "raw_completion", "prompt_ids", "completion_ids", "group", "pictures", "last_picture")
    class PicturesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class LastPictureEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_FIELD_NUMBER: _ClassVar[int]
    REFERENCE_FIELD_NUMBER: _ClassVar[int]
    METADATA_JSON_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    RAW_PROMPT_FIELD_NUMBER: _ClassVar[int]
    RAW_COMPLETION_FIELD_NUMBER: _ClassVar[int]
    PROMPT_IDS_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_IDS_FIELD_NUMBER: _ClassVar[int]
    GROUP_FIELD_NUMBER: _ClassVar[int]
    PICTURES_FIELD_NUMBER: _ClassVar[int]
    LAST_PICTURE_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    attempt: int
    prompt: str
    completion: str
    reference: str
    metadata_json: str
    finish_reason: _common_pb2.FinishReason
    token_count: int
    evaluation: bool
    stage: str
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChatMessage]
    conversation: _common_pb2.Conversation
    raw_prompt: str
    raw_completion: str
    prompt_ids: _containers.RepeatedScalarFieldContainer[int]
    completion_ids: _containers.RepeatedScalarFieldContainer[int]
    group: _containers.RepeatedScalarFieldContainer[str]
    pictures: _containers.MessageMap[str, _common_pb2.Tensor]
    last_picture: _containers.MessageMap[str, _common_pb2.Tensor]
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., prompt: _Optional[str] = ..., completion: _Optional[str] = ..., reference: _Optional[str] = ..., metadata_json: _Optional[str] = ..., finish_reason: _Optional[_Union[_common_pb2.FinishReason, str]] = ..., token_count: _Optional[int] = ..., evaluation: _Optional[bool] = ..., stage: _Optional[str] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.ChatMessage, _Mapping]]] = ..., conversation: _Optional[_Union[_common_pb2.Conversation, _Mapping]] = ..., raw_prompt: _Optional[str] = ..., raw_completion: _Optional[str] = ..., prompt_ids: _Optional[_Iterable[int]] = ..., completion_ids: _Optional[_Iterable[int]] = ..., group: _Optional[_Iterable[str]] = ..., pictures: _Optional[_Mapping[str, _common_pb2.Tensor]] = ..., last_picture: _Optional[_Mapping[str, _common_pb2.Tensor]] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("results",)
    RESULTS_FIELD_NUMBER: _ClassVar[int]
    results: _containers.RepeatedCompositeFieldContainer[ScoreResult]
    def __init__(self, results: _Optional[_Iterable[_Union[ScoreResult, _Mapping]]] = ...) -> None: ...

class ScoreResult(_message.Message):
    __slots__ = ("sample", "attempt", "status", "reward", "parts", "detail", "wall_time", "evaluation", "stage", "turns")
    class PartsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    attempt: int
    status: ScoreStatus
    reward: float
    parts: _containers.ScalarMap[str, float]
    detail: str
    wall_time: _duration_pb2.Duration
    evaluation: bool
    stage: str
    turns: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., status: _Optional[_Union[ScoreStatus, str]] = ..., reward: _Optional[float] = ..., parts: _Optional[_Mapping[str, float]] = ..., detail: _Optional[str] = ..., wall_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., evaluation: _Optional[bool] = ..., stage: _Optional[str] = ..., turns: _Optional[_Iterable[float]] = ...) -> None: ...

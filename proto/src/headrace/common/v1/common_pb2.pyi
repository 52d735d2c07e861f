import datetime

from google.protobuf import duration_pb2 as _duration_pb2
from google.protobuf.internal import containers as _containers
from google.protobuf.internal import enum_type_wrapper as _enum_type_wrapper
from google.protobuf import descriptor as _descriptor
from google.protobuf import message as _message
from collections.abc import Iterable as _Iterable, Mapping as _Mapping
from typing import ClassVar as _ClassVar, Optional as _Optional, Union as _Union

DESCRIPTOR: _descriptor.FileDescriptor

class DataType(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    DATA_TYPE_UNSPECIFIED: _ClassVar[DataType]
    DATA_TYPE_BOOL: _ClassVar[DataType]
    DATA_TYPE_UINT8: _ClassVar[DataType]
    DATA_TYPE_INT8: _ClassVar[DataType]
    DATA_TYPE_INT16: _ClassVar[DataType]
    DATA_TYPE_INT32: _ClassVar[DataType]
    DATA_TYPE_INT64: _ClassVar[DataType]
    DATA_TYPE_FLOAT16: _ClassVar[DataType]
    DATA_TYPE_BFLOAT16: _ClassVar[DataType]
    DATA_TYPE_FLOAT32: _ClassVar[DataType]
    DATA_TYPE_FLOAT64: _ClassVar[DataType]

class OpenPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OPEN_PHASE_UNSPECIFIED: _ClassVar[OpenPhase]
    OPEN_PHASE_OPENING: _ClassVar[OpenPhase]
    OPEN_PHASE_OPEN: _ClassVar[OpenPhase]
    OPEN_PHASE_CLOSING: _ClassVar[OpenPhase]

class WeightTransport(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WEIGHT_TRANSPORT_UNSPECIFIED: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_GRPC: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_SHM: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_CUDA_IPC: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_COLLECTIVE: _ClassVar[WeightTransport]
    WEIGHT_TRANSPORT_DELTA: _ClassVar[WeightTransport]

class LogProbKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    LOG_PROB_KIND_UNSPECIFIED: _ClassVar[LogProbKind]
    LOG_PROB_KIND_RAW: _ClassVar[LogProbKind]
    LOG_PROB_KIND_PROCESSED: _ClassVar[LogProbKind]

class FinishReason(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    FINISH_REASON_UNSPECIFIED: _ClassVar[FinishReason]
    FINISH_REASON_EOS: _ClassVar[FinishReason]
    FINISH_REASON_STOP: _ClassVar[FinishReason]
    FINISH_REASON_LENGTH: _ClassVar[FinishReason]
    FINISH_REASON_ABORTED: _ClassVar[FinishReason]
    FINISH_REASON_PROMPT_TOO_LONG: _ClassVar[FinishReason]
    FINISH_REASON_TERMINATED: _ClassVar[FinishReason]
    FINISH_REASON_TRUNCATED: _ClassVar[FinishReason]
    FINISH_REASON_ERROR: _ClassVar[FinishReason]
    FINISH_REASON_TIMED_OUT: _ClassVar[FinishReason]
DATA_TYPE_UNSPECIFIED: DataType
DATA_TYPE_BOOL: DataType
DATA_TYPE_UINT8: DataType
DATA_TYPE_INT8: DataType
DATA_TYPE_INT16: DataType
DATA_TYPE_INT32: DataType
DATA_TYPE_INT64: DataType
DATA_TYPE_FLOAT16: DataType
DATA_TYPE_BFLOAT16: DataType
DATA_TYPE_FLOAT32: DataType
DATA_TYPE_FLOAT64: DataType
OPEN_PHASE_UNSPECIFIED: OpenPhase
OPEN_PHASE_OPENING: OpenPhase
OPEN_PHASE_OPEN: OpenPhase
OPEN_PHASE_CLOSING: OpenPhase
WEIGHT_TRANSPORT_UNSPECIFIED: WeightTransport
WEIGHT_TRANSPORT_GRPC: WeightTransport
WEIGHT_TRANSPORT_SHM: WeightTransport
WEIGHT_TRANSPORT_CUDA_IPC: WeightTransport
WEIGHT_TRANSPORT_COLLECTIVE: WeightTransport
WEIGHT_TRANSPORT_DELTA: WeightTransport
LOG_PROB_KIND_UNSPECIFIED: LogProbKind
LOG_PROB_KIND_RAW: LogProbKind
LOG_PROB_KIND_PROCESSED: LogProbKind
FINISH_REASON_UNSPECIFIED: FinishReason
FINISH_REASON_EOS: FinishReason
FINISH_REASON_STOP: FinishReason
FINISH_REASON_LENGTH: FinishReason
FINISH_REASON_ABORTED: FinishReason
FINISH_REASON_PROMPT_TOO_LONG: FinishReason
FINISH_REASON_TERMINATED: FinishReason
FINISH_REASON_TRUNCATED: FinishReason
FINISH_REASON_ERROR: FinishReason
FINISH_REASON_TIMED_OUT: FinishReason

class BlobRef(_message.Message):
    __slots__ = ("producer_address", "incarnation", "blob_id", "size_bytes", "digest")
    PRODUCER_ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    BLOB_ID_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    producer_address: str
    incarnation: str
    blob_id: str
    size_bytes: int
    digest: str
    def __init__(self, producer_address: _Optional[str] = ..., incarnation: _Optional[str] = ..., blob_id: _Optional[str] = ..., size_bytes: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class Tensor(_message.Message):
    __slots__ = ("data_type", "shape", "data", "blob")
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    BLOB_FIELD_NUMBER: _ClassVar[int]
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    data: bytes
    blob: BlobRef
    def __init__(self, data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., data: _Optional[bytes] = ..., blob: _Optional[_Union[BlobRef, _Mapping]] = ...) -> None: ...

class CommandHeader(_message.Message):
    __slots__ = ("request_id", "run", "coordinator_epoch", "lease_epoch", "open_id", "command_sequence", "lease_epochs")
    REQUEST_ID_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    COORDINATOR_EPOCH_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCH_FIELD_NUMBER: _ClassVar[int]
    OPEN_ID_FIELD_NUMBER: _ClassVar[int]
    COMMAND_SEQUENCE_FIELD_NUMBER: _ClassVar[int]
    LEASE_EPOCHS_FIELD_NUMBER: _ClassVar[int]
    request_id: str
    run: str
    coordinator_epoch: int
    lease_epoch: int
    open_id: int
    command_sequence: int
    lease_epochs: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, request_id: _Optional[str] = ..., run: _Optional[str] = ..., coordinator_epoch: _Optional[int] = ..., lease_epoch: _Optional[int] = ..., open_id: _Optional[int] = ..., command_sequence: _Optional[int] = ..., lease_epochs: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenRunReport(_message.Message):
    __slots__ = ("run", "open_id", "phase", "last_command")
    RUN_FIELD_NUMBER: _ClassVar[int]
    OPEN_ID_FIELD_NUMBER: _ClassVar[int]
    PHASE_FIELD_NUMBER: _ClassVar[int]
    LAST_COMMAND_FIELD_NUMBER: _ClassVar[int]
    run: str
    open_id: int
    phase: OpenPhase
    last_command: int
    def __init__(self, run: _Optional[str] = ..., open_id: _Optional[int] = ..., phase: _Optional[_Union[OpenPhase, str]] = ..., last_command: _Optional[int] = ...) -> None: ...

class PolicyVersion(_message.Message):
    __slots__ = ("number", "parent", "ordinal", "digest")
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PARENT_FIELD_NUMBER: _ClassVar[int]
    ORDINAL_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    number: int
    parent: int
    ordinal: int
    digest: str
    def __init__(self, number: _Optional[int] = ..., parent: _Optional[int] = ..., ordinal: _Optional[int] = ..., digest: _Optional[str] = ...) -> None: ...

class WeightEntry(_message.Message):
    __slots__ = ("name", "data_type", "shape", "digest", "offset_bytes", "size_bytes")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    OFFSET_BYTES_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    digest: str
    offset_bytes: int
    size_bytes: int
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., digest: _Optional[str] = ..., offset_bytes: _Optional[int] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class WeightManifest(_message.Message):
    __slots__ = ("entries", "digest", "size_bytes", "adapter")
    ENTRIES_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    ADAPTER_FIELD_NUMBER: _ClassVar[int]
    entries: _containers.RepeatedCompositeFieldContainer[WeightEntry]
    digest: str
    size_bytes: int
    adapter: AdapterBase
    def __init__(self, entries: _Optional[_Iterable[_Union[WeightEntry, _Mapping]]] = ..., digest: _Optional[str] = ..., size_bytes: _Optional[int] = ..., adapter: _Optional[_Union[AdapterBase, _Mapping]] = ...) -> None: ...

class AdapterBase(_message.Message):
    __slots__ = ("digest", "scales")
    class ScalesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    SCALES_FIELD_NUMBER: _ClassVar[int]
    digest: str
    scales: _containers.ScalarMap[str, float]
    def __init__(self, digest: _Optional[str] = ..., scales: _Optional[_Mapping[str, float]] = ...) -> None: ...

class WeightSource(_message.Message):
    __slots__ = ("address", "incarnation", "shm_path", "shm_nonce_path", "shm_nonce", "transports", "relay", "delta_bases", "receivers", "withheld", "parts")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    INCARNATION_FIELD_NUMBER: _ClassVar[int]
    SHM_PATH_FIELD_NUMBER: _ClassVar[int]
    SHM_NONCE_PATH_FIELD_NUMBER: _ClassVar[int]
    SHM_NONCE_FIELD_NUMBER: _ClassVar[int]
    TRANSPORTS_FIELD_NUMBER: _ClassVar[int]
    RELAY_FIELD_NUMBER: _ClassVar[int]
    DELTA_BASES_FIELD_NUMBER: _ClassVar[int]
    RECEIVERS_FIELD_NUMBER: _ClassVar[int]
    WITHHELD_FIELD_NUMBER: _ClassVar[int]
    PARTS_FIELD_NUMBER: _ClassVar[int]
    address: str
    incarnation: str
    shm_path: str
    shm_nonce_path: str
    shm_nonce: str
    transports: _containers.RepeatedScalarFieldContainer[WeightTransport]
    relay: bool
    delta_bases: _containers.RepeatedScalarFieldContainer[str]
    receivers: int
    withheld: _containers.RepeatedCompositeFieldContainer[WithheldTransport]
    parts: _containers.RepeatedCompositeFieldContainer[WeightPart]
    def __init__(self, address: _Optional[str] = ..., incarnation: _Optional[str] = ..., shm_path: _Optional[str] = ..., shm_nonce_path: _Optional[str] = ..., shm_nonce: _Optional[str] = ..., transports: _Optional[_Iterable[_Union[WeightTransport, str]]] = ..., relay: _Optional[bool] = ..., delta_bases: _Optional[_Iterable[str]] = ..., receivers: _Optional[int] = ..., withheld: _Optional[_Iterable[_Union[WithheldTransport, _Mapping]]] = ..., parts: _Optional[_Iterable[_Union[WeightPart, _Mapping]]] = ...) -> None: ...

class WeightPart(_message.Message):
    __slots__ = ("source", "tensors")
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    TENSORS_FIELD_NUMBER: _ClassVar[int]
    source: WeightSource
    tensors: int
    def __init__(self, source: _Optional[_Union[WeightSource, _Mapping]] = ..., tensors: _Optional[int] = ...) -> None: ...

class WithheldTransport(_message.Message):
    __slots__ = ("transport", "reason")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    transport: WeightTransport
    reason: str
    def __init__(self, transport: _Optional[_Union[WeightTransport, str]] = ..., reason: _Optional[str] = ...) -> None: ...

class SamplingDistribution(_message.Message):
    __slots__ = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "log_prob_kind")
    TEMPERATURE_FIELD_NUMBER: _ClassVar[int]
    TOP_P_FIELD_NUMBER: _ClassVar[int]
    TOP_K_FIELD_NUMBER: _ClassVar[int]
    MIN_P_FIELD_NUMBER: _ClassVar[int]
    REPETITION_PENALTY_FIELD_NUMBER: _ClassVar[int]
    LOG_PROB_KIND_FIELD_NUMBER: _ClassVar[int]
    temperature: float
    top_p: float
    top_k: int
    min_p: float
    repetition_penalty: float
    log_prob_kind: LogProbKind
    def __init__(self, temperature: _Optional[float] = ..., top_p: _Optional[float] = ..., top_k: _Optional[int] = ..., min_p: _Optional[float] = ..., repetition_penalty: _Optional[float] = ..., log_prob_kind: _Optional[_Union[LogProbKind, str]] = ...) -> None: ...

class SlotKey(_message.Message):
    __slots__ = ("prompt_ordinal", "sample_index")
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    prompt_ordinal: int
    sample_index: int
    def __init__(self, prompt_ordinal: _Optional[int] = ..., sample_index: _Optional[int] = ...) -> None: ...

class TokenSegment(_message.Message):
    __slots__ = ("token_ids", "log_probs", "distribution", "text_bytes")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    TEXT_BYTES_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    distribution: SamplingDistribution
    text_bytes: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., distribution: _Optional[_Union[SamplingDistribution, _Mapping]] = ..., text_bytes: _Optional[_Iterable[int]] = ...) -> None: ...

class ActionSegment(_message.Message):
    __slots__ = ("observation", "sampled", "executed_action", "valid_mask", "log_probs", "rewards", "successes", "terminated", "truncated", "final_observation", "values", "intervened", "author")
    class ObservationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    class SampledEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    class FinalObservationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[Tensor, _Mapping]] = ...) -> None: ...
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    SAMPLED_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_ACTION_FIELD_NUMBER: _ClassVar[int]
    VALID_MASK_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSES_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    FINAL_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    INTERVENED_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    observation: _containers.MessageMap[str, Tensor]
    sampled: _containers.MessageMap[str, Tensor]
    executed_action: Tensor
    valid_mask: Tensor
    log_probs: Tensor
    rewards: Tensor
    successes: Tensor
    terminated: bool
    truncated: bool
    final_observation: _containers.MessageMap[str, Tensor]
    values: Tensor
    intervened: Tensor
    author: str
    def __init__(self, observation: _Optional[_Mapping[str, Tensor]] = ..., sampled: _Optional[_Mapping[str, Tensor]] = ..., executed_action: _Optional[_Union[Tensor, _Mapping]] = ..., valid_mask: _Optional[_Union[Tensor, _Mapping]] = ..., log_probs: _Optional[_Union[Tensor, _Mapping]] = ..., rewards: _Optional[_Union[Tensor, _Mapping]] = ..., successes: _Optional[_Union[Tensor, _Mapping]] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., final_observation: _Optional[_Mapping[str, Tensor]] = ..., values: _Optional[_Union[Tensor, _Mapping]] = ..., intervened: _Optional[_Union[Tensor, _Mapping]] = ..., author: _Optional[str] = ...) -> None: ...

class Segment(_message.Message):
    __slots__ = ("policy_number", "tokens", "actions")
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    ACTIONS_FIELD_NUMBER: _ClassVar[int]
    policy_number: int
    tokens: TokenSegment
    actions: ActionSegment
    def __init__(self, policy_number: _Optional[int] = ..., tokens: _Optional[_Union[TokenSegment, _Mapping]] = ..., actions: _Optional[_Union[ActionSegment, _Mapping]] = ...) -> None: ...

class Branch(_message.Message):
    __slots__ = ("segments", "images", "routed_experts", "cut", "given_json", "teacher_top")
    SEGMENTS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    CUT_FIELD_NUMBER: _ClassVar[int]
    GIVEN_JSON_FIELD_NUMBER: _ClassVar[int]
    TEACHER_TOP_FIELD_NUMBER: _ClassVar[int]
    segments: _containers.RepeatedCompositeFieldContainer[Segment]
    images: _containers.RepeatedCompositeFieldContainer[ImageAt]
    routed_experts: bytes
    cut: bool
    given_json: str
    teacher_top: bytes
    def __init__(self, segments: _Optional[_Iterable[_Union[Segment, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[ImageAt, _Mapping]]] = ..., routed_experts: _Optional[bytes] = ..., cut: _Optional[bool] = ..., given_json: _Optional[str] = ..., teacher_top: _Optional[bytes] = ...) -> None: ...

class ImageAt(_message.Message):
    __slots__ = ("digest", "start")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    digest: str
    start: int
    def __init__(self, digest: _Optional[str] = ..., start: _Optional[int] = ...) -> None: ...

class Trajectory(_message.Message):
    __slots__ = ("sample", "attempt", "branches", "finish_reason", "producer", "conversation", "completion_text", "raw_prompt_text", "raw_completion_text", "images", "body_digest", "branch_texts")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BRANCHES_FIELD_NUMBER: _ClassVar[int]
    FINISH_REASON_FIELD_NUMBER: _ClassVar[int]
    PRODUCER_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    COMPLETION_TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_PROMPT_TEXT_FIELD_NUMBER: _ClassVar[int]
    RAW_COMPLETION_TEXT_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    BRANCH_TEXTS_FIELD_NUMBER: _ClassVar[int]
    sample: SlotKey
    attempt: int
    branches: _containers.RepeatedCompositeFieldContainer[Branch]
    finish_reason: FinishReason
    producer: str
    conversation: Conversation
    completion_text: str
    raw_prompt_text: str
    raw_completion_text: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    body_digest: str
    branch_texts: _containers.RepeatedCompositeFieldContainer[BranchText]
    def __init__(self, sample: _Optional[_Union[SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., branches: _Optional[_Iterable[_Union[Branch, _Mapping]]] = ..., finish_reason: _Optional[_Union[FinishReason, str]] = ..., producer: _Optional[str] = ..., conversation: _Optional[_Union[Conversation, _Mapping]] = ..., completion_text: _Optional[str] = ..., raw_prompt_text: _Optional[str] = ..., raw_completion_text: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., body_digest: _Optional[str] = ..., branch_texts: _Optional[_Iterable[_Union[BranchText, _Mapping]]] = ...) -> None: ...

class BranchText(_message.Message):
    __slots__ = ("parts",)
    PARTS_FIELD_NUMBER: _ClassVar[int]
    parts: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, parts: _Optional[_Iterable[str]] = ...) -> None: ...

class Conversation(_message.Message):
    __slots__ = ("messages", "turns", "success", "failure", "figures")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TURNS_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    FAILURE_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[ChatMessage]
    turns: _containers.RepeatedCompositeFieldContainer[Turn]
    success: bool
    failure: str
    figures: _containers.ScalarMap[str, float]
    def __init__(self, messages: _Optional[_Iterable[_Union[ChatMessage, _Mapping]]] = ..., turns: _Optional[_Iterable[_Union[Turn, _Mapping]]] = ..., success: _Optional[bool] = ..., failure: _Optional[str] = ..., figures: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Turn(_message.Message):
    __slots__ = ("message", "branch", "tokens", "reward")
    MESSAGE_FIELD_NUMBER: _ClassVar[int]
    BRANCH_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    message: int
    branch: int
    tokens: int
    reward: float
    def __init__(self, message: _Optional[int] = ..., branch: _Optional[int] = ..., tokens: _Optional[int] = ..., reward: _Optional[float] = ...) -> None: ...

class TrajectoryChunk(_message.Message):
    __slots__ = ("sample", "attempt", "token_offset", "policy_number", "token_ids", "log_probs", "finished")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_OFFSET_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    FINISHED_FIELD_NUMBER: _ClassVar[int]
    sample: SlotKey
    attempt: int
    token_offset: int
    policy_number: int
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    finished: Trajectory
    def __init__(self, sample: _Optional[_Union[SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., token_offset: _Optional[int] = ..., policy_number: _Optional[int] = ..., token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., finished: _Optional[_Union[Trajectory, _Mapping]] = ...) -> None: ...

class ResumeState(_message.Message):
    __slots__ = ("token_ids", "log_probs", "version_spans", "rng_position", "extra_json", "cache", "routed_experts")
    class ExtraJsonEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    VERSION_SPANS_FIELD_NUMBER: _ClassVar[int]
    RNG_POSITION_FIELD_NUMBER: _ClassVar[int]
    EXTRA_JSON_FIELD_NUMBER: _ClassVar[int]
    CACHE_FIELD_NUMBER: _ClassVar[int]
    ROUTED_EXPERTS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    version_spans: _containers.RepeatedCompositeFieldContainer[VersionSpan]
    rng_position: int
    extra_json: _containers.ScalarMap[str, str]
    cache: CachedContext
    routed_experts: bytes
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ..., version_spans: _Optional[_Iterable[_Union[VersionSpan, _Mapping]]] = ..., rng_position: _Optional[int] = ..., extra_json: _Optional[_Mapping[str, str]] = ..., cache: _Optional[_Union[CachedContext, _Mapping]] = ..., routed_experts: _Optional[bytes] = ...) -> None: ...

class CachedContext(_message.Message):
    __slots__ = ("blob", "form", "tokens")
    BLOB_FIELD_NUMBER: _ClassVar[int]
    FORM_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    blob: BlobRef
    form: str
    tokens: int
    def __init__(self, blob: _Optional[_Union[BlobRef, _Mapping]] = ..., form: _Optional[str] = ..., tokens: _Optional[int] = ...) -> None: ...

class VersionSpan(_message.Message):
    __slots__ = ("policy_number", "token_count")
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    policy_number: int
    token_count: int
    def __init__(self, policy_number: _Optional[int] = ..., token_count: _Optional[int] = ...) -> None: ...

class StageMetrics(_message.Message):
    __slots__ = ("stage", "wall_time", "items", "tokens", "peak_memory_bytes", "values")
    class ValuesEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STAGE_FIELD_NUMBER: _ClassVar[int]
    WALL_TIME_FIELD_NUMBER: _ClassVar[int]
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_FIELD_NUMBER: _ClassVar[int]
    PEAK_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    VALUES_FIELD_NUMBER: _ClassVar[int]
    stage: str
    wall_time: _duration_pb2.Duration
    items: int
    tokens: int
    peak_memory_bytes: int
    values: _containers.ScalarMap[str, float]
    def __init__(self, stage: _Optional[str] = ..., wall_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., items: _Optional[int] = ..., tokens: _Optional[int] = ..., peak_memory_bytes: _Optional[int] = ..., values: _Optional[_Mapping[str, float]] = ...) -> None: ...

class Lease(_message.Message):
    __slots__ = ("epoch", "run", "stage", "devices", "ttl", "memory_part")
    EPOCH_FIELD_NUMBER: _ClassVar[int]
    RUN_FIELD_NUMBER: _ClassVar[int]
    STAGE_FIELD_NUMBER: _ClassVar[int]
    DEVICES_FIELD_NUMBER: _ClassVar[int]
    TTL_FIELD_NUMBER: _ClassVar[int]
    MEMORY_PART_FIELD_NUMBER: _ClassVar[int]
    epoch: int
    run: str
    stage: str
    devices: _containers.RepeatedScalarFieldContainer[str]
    ttl: _duration_pb2.Duration
    memory_part: float
    def __init__(self, epoch: _Optional[int] = ..., run: _Optional[str] = ..., stage: _Optional[str] = ..., devices: _Optional[_Iterable[str]] = ..., ttl: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., memory_part: _Optional[float] = ...) -> None: ...

class Image(_message.Message):
    __slots__ = ("digest", "data")
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DATA_FIELD_NUMBER: _ClassVar[int]
    digest: str
    data: bytes
    def __init__(self, digest: _Optional[str] = ..., data: _Optional[bytes] = ...) -> None: ...

class ChatMessage(_message.Message):
    __slots__ = ("role", "content", "party", "images", "keys_json")
    ROLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    PARTY_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    KEYS_JSON_FIELD_NUMBER: _ClassVar[int]
    role: str
    content: str
    party: str
    images: _containers.RepeatedCompositeFieldContainer[Image]
    keys_json: str
    def __init__(self, role: _Optional[str] = ..., content: _Optional[str] = ..., party: _Optional[str] = ..., images: _Optional[_Iterable[_Union[Image, _Mapping]]] = ..., keys_json: _Optional[str] = ...) -> None: ...

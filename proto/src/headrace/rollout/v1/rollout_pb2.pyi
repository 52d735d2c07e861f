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

class WakeScope(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    WAKE_SCOPE_UNSPECIFIED: _ClassVar[WakeScope]
    WAKE_SCOPE_WEIGHTS: _ClassVar[WakeScope]
    WAKE_SCOPE_KV_CACHE: _ClassVar[WakeScope]
WAKE_SCOPE_UNSPECIFIED: WakeScope
WAKE_SCOPE_WEIGHTS: WakeScope
WAKE_SCOPE_KV_CACHE: WakeScope

class OpenRunRequest(_message.Message):
    __slots__ = ("header", "config_json", "engine_group")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    ENGINE_GROUP_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    config_json: str
    engine_group: EngineGroup
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., config_json: _Optional[str] = ..., engine_group: _Optional[_Union[EngineGroup, _Mapping]] = ...) -> None: ...

class EngineGroup(_message.Message):
    __slots__ = ("rank", "leader")
    RANK_FIELD_NUMBER: _ClassVar[int]
    LEADER_FIELD_NUMBER: _ClassVar[int]
    rank: int
    leader: str
    def __init__(self, rank: _Optional[int] = ..., leader: _Optional[str] = ...) -> None: ...

class FollowRequest(_message.Message):
    __slots__ = ("run", "rank", "instance", "placed", "start", "ended", "versions")
    RUN_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    INSTANCE_FIELD_NUMBER: _ClassVar[int]
    PLACED_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    ENDED_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    run: str
    rank: int
    instance: str
    placed: bool
    start: int
    ended: str
    versions: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, run: _Optional[str] = ..., rank: _Optional[int] = ..., instance: _Optional[str] = ..., placed: _Optional[bool] = ..., start: _Optional[int] = ..., ended: _Optional[str] = ..., versions: _Optional[_Iterable[str]] = ...) -> None: ...

class FollowResponse(_message.Message):
    __slots__ = ("start", "meeting_host", "meeting_port")
    START_FIELD_NUMBER: _ClassVar[int]
    MEETING_HOST_FIELD_NUMBER: _ClassVar[int]
    MEETING_PORT_FIELD_NUMBER: _ClassVar[int]
    start: int
    meeting_host: str
    meeting_port: int
    def __init__(self, start: _Optional[int] = ..., meeting_host: _Optional[str] = ..., meeting_port: _Optional[int] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("max_concurrency", "max_context_tokens", "endpoint_url")
    MAX_CONCURRENCY_FIELD_NUMBER: _ClassVar[int]
    MAX_CONTEXT_TOKENS_FIELD_NUMBER: _ClassVar[int]
    ENDPOINT_URL_FIELD_NUMBER: _ClassVar[int]
    max_concurrency: int
    max_context_tokens: int
    endpoint_url: str
    def __init__(self, max_concurrency: _Optional[int] = ..., max_context_tokens: _Optional[int] = ..., endpoint_url: _Optional[str] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GenerateRequest(_message.Message):
    __slots__ = ("open", "assign", "reauthorize")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    REAUTHORIZE_FIELD_NUMBER: _ClassVar[int]
    open: GenerateOpen
    assign: AssignGroups
    reauthorize: Reauthorize
    def __init__(self, open: _Optional[_Union[GenerateOpen, _Mapping]] = ..., assign: _Optional[_Union[AssignGroups, _Mapping]] = ..., reauthorize: _Optional[_Union[Reauthorize, _Mapping]] = ...) -> None: ...

class Reauthorize(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class GenerateOpen(_message.Message):
    __slots__ = ("header", "policy_number", "distribution", "max_new_tokens", "stop", "seed", "chunk_tokens", "evaluation", "pools")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    MAX_NEW_TOKENS_FIELD_NUMBER: _ClassVar[int]
    STOP_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    CHUNK_TOKENS_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    policy_number: int
    distribution: _common_pb2.SamplingDistribution
    max_new_tokens: int
    stop: _containers.RepeatedScalarFieldContainer[str]
    seed: int
    chunk_tokens: int
    evaluation: bool
    pools: _containers.RepeatedCompositeFieldContainer[EnvironmentPool]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., policy_number: _Optional[int] = ..., distribution: _Optional[_Union[_common_pb2.SamplingDistribution, _Mapping]] = ..., max_new_tokens: _Optional[int] = ..., stop: _Optional[_Iterable[str]] = ..., seed: _Optional[int] = ..., chunk_tokens: _Optional[int] = ..., evaluation: _Optional[bool] = ..., pools: _Optional[_Iterable[_Union[EnvironmentPool, _Mapping]]] = ...) -> None: ...

class AssignGroups(_message.Message):
    __slots__ = ("groups",)
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    groups: _containers.RepeatedCompositeFieldContainer[GroupAssignment]
    def __init__(self, groups: _Optional[_Iterable[_Union[GroupAssignment, _Mapping]]] = ...) -> None: ...

class GroupAssignment(_message.Message):
    __slots__ = ("prompt_ordinal", "prompt", "samples", "oldest_version")
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    PROMPT_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    prompt_ordinal: int
    prompt: Prompt
    samples: _containers.RepeatedCompositeFieldContainer[SampleAssignment]
    oldest_version: int
    def __init__(self, prompt_ordinal: _Optional[int] = ..., prompt: _Optional[_Union[Prompt, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[SampleAssignment, _Mapping]]] = ..., oldest_version: _Optional[int] = ...) -> None: ...

class Prompt(_message.Message):
    __slots__ = ("chat", "text", "token_ids", "episode", "images")
    CHAT_FIELD_NUMBER: _ClassVar[int]
    TEXT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    EPISODE_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    chat: ChatPrompt
    text: str
    token_ids: TokenIds
    episode: EpisodeStart
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.Image]
    def __init__(self, chat: _Optional[_Union[ChatPrompt, _Mapping]] = ..., text: _Optional[str] = ..., token_ids: _Optional[_Union[TokenIds, _Mapping]] = ..., episode: _Optional[_Union[EpisodeStart, _Mapping]] = ..., images: _Optional[_Iterable[_Union[_common_pb2.Image, _Mapping]]] = ...) -> None: ...

class EpisodeStart(_message.Message):
    __slots__ = ("task", "seed", "init_state", "instruction", "record", "options_json")
    TASK_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    INIT_STATE_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    task: str
    seed: int
    init_state: int
    instruction: str
    record: bool
    options_json: str
    def __init__(self, task: _Optional[str] = ..., seed: _Optional[int] = ..., init_state: _Optional[int] = ..., instruction: _Optional[str] = ..., record: _Optional[bool] = ..., options_json: _Optional[str] = ...) -> None: ...

class ChatPrompt(_message.Message):
    __slots__ = ("messages", "prefill", "template_arguments_json")
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    PREFILL_FIELD_NUMBER: _ClassVar[int]
    TEMPLATE_ARGUMENTS_JSON_FIELD_NUMBER: _ClassVar[int]
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChatMessage]
    prefill: str
    template_arguments_json: str
    def __init__(self, messages: _Optional[_Iterable[_Union[_common_pb2.ChatMessage, _Mapping]]] = ..., prefill: _Optional[str] = ..., template_arguments_json: _Optional[str] = ...) -> None: ...

class TokenIds(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, values: _Optional[_Iterable[int]] = ...) -> None: ...

class SampleAssignment(_message.Message):
    __slots__ = ("sample_index", "attempt", "resume", "greedy", "shown")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    RESUME_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    SHOWN_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    attempt: int
    resume: _common_pb2.ResumeState
    greedy: bool
    shown: bool
    def __init__(self, sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., resume: _Optional[_Union[_common_pb2.ResumeState, _Mapping]] = ..., greedy: _Optional[bool] = ..., shown: _Optional[bool] = ...) -> None: ...

class GenerateResponse(_message.Message):
    __slots__ = ("chunks", "partials", "revoked", "prefills", "stages", "lost_pools", "sessions")
    class SessionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: int
        def __init__(self, key: _Optional[str] = ..., value: _Optional[int] = ...) -> None: ...
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    PREFILLS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    LOST_POOLS_FIELD_NUMBER: _ClassVar[int]
    SESSIONS_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_common_pb2.TrajectoryChunk]
    partials: _containers.RepeatedCompositeFieldContainer[PartialSample]
    revoked: bool
    prefills: _containers.RepeatedCompositeFieldContainer[Prefill]
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageMetrics]
    lost_pools: _containers.RepeatedScalarFieldContainer[str]
    sessions: _containers.ScalarMap[str, int]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_common_pb2.TrajectoryChunk, _Mapping]]] = ..., partials: _Optional[_Iterable[_Union[PartialSample, _Mapping]]] = ..., revoked: _Optional[bool] = ..., prefills: _Optional[_Iterable[_Union[Prefill, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.StageMetrics, _Mapping]]] = ..., lost_pools: _Optional[_Iterable[str]] = ..., sessions: _Optional[_Mapping[str, int]] = ...) -> None: ...

class Prefill(_message.Message):
    __slots__ = ("began_ago", "lasted")
    BEGAN_AGO_FIELD_NUMBER: _ClassVar[int]
    LASTED_FIELD_NUMBER: _ClassVar[int]
    began_ago: _duration_pb2.Duration
    lasted: _duration_pb2.Duration
    def __init__(self, began_ago: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., lasted: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class PartialSample(_message.Message):
    __slots__ = ("sample", "attempt", "state")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    STATE_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    attempt: int
    state: _common_pb2.ResumeState
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., state: _Optional[_Union[_common_pb2.ResumeState, _Mapping]] = ...) -> None: ...

class RunEpisodesRequest(_message.Message):
    __slots__ = ("open", "assign", "reauthorize")
    OPEN_FIELD_NUMBER: _ClassVar[int]
    ASSIGN_FIELD_NUMBER: _ClassVar[int]
    REAUTHORIZE_FIELD_NUMBER: _ClassVar[int]
    open: RunEpisodesOpen
    assign: AssignGroups
    reauthorize: Reauthorize
    def __init__(self, open: _Optional[_Union[RunEpisodesOpen, _Mapping]] = ..., assign: _Optional[_Union[AssignGroups, _Mapping]] = ..., reauthorize: _Optional[_Union[Reauthorize, _Mapping]] = ...) -> None: ...

class RunEpisodesOpen(_message.Message):
    __slots__ = ("header", "policy_number", "seed", "pools", "greedy", "evaluation", "until_success")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    POOLS_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIELD_NUMBER: _ClassVar[int]
    EVALUATION_FIELD_NUMBER: _ClassVar[int]
    UNTIL_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    policy_number: int
    seed: int
    pools: _containers.RepeatedCompositeFieldContainer[EnvironmentPool]
    greedy: bool
    evaluation: bool
    until_success: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., policy_number: _Optional[int] = ..., seed: _Optional[int] = ..., pools: _Optional[_Iterable[_Union[EnvironmentPool, _Mapping]]] = ..., greedy: _Optional[bool] = ..., evaluation: _Optional[bool] = ..., until_success: _Optional[bool] = ...) -> None: ...

class EnvironmentPool(_message.Message):
    __slots__ = ("address", "header", "pool", "pool_incarnation", "count", "task")
    ADDRESS_FIELD_NUMBER: _ClassVar[int]
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    TASK_FIELD_NUMBER: _ClassVar[int]
    address: str
    header: _common_pb2.CommandHeader
    pool: str
    pool_incarnation: str
    count: int
    task: str
    def __init__(self, address: _Optional[str] = ..., header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., pool: _Optional[str] = ..., pool_incarnation: _Optional[str] = ..., count: _Optional[int] = ..., task: _Optional[str] = ...) -> None: ...

class RunEpisodesResponse(_message.Message):
    __slots__ = ("chunks", "partials", "revoked", "lost_pools", "videos", "stages")
    CHUNKS_FIELD_NUMBER: _ClassVar[int]
    PARTIALS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    LOST_POOLS_FIELD_NUMBER: _ClassVar[int]
    VIDEOS_FIELD_NUMBER: _ClassVar[int]
    STAGES_FIELD_NUMBER: _ClassVar[int]
    chunks: _containers.RepeatedCompositeFieldContainer[_common_pb2.TrajectoryChunk]
    partials: _containers.RepeatedCompositeFieldContainer[PartialSample]
    revoked: bool
    lost_pools: _containers.RepeatedScalarFieldContainer[str]
    videos: _containers.RepeatedCompositeFieldContainer[EpisodeVideo]
    stages: _containers.RepeatedCompositeFieldContainer[_common_pb2.StageMetrics]
    def __init__(self, chunks: _Optional[_Iterable[_Union[_common_pb2.TrajectoryChunk, _Mapping]]] = ..., partials: _Optional[_Iterable[_Union[PartialSample, _Mapping]]] = ..., revoked: _Optional[bool] = ..., lost_pools: _Optional[_Iterable[str]] = ..., videos: _Optional[_Iterable[_Union[EpisodeVideo, _Mapping]]] = ..., stages: _Optional[_Iterable[_Union[_common_pb2.StageMetrics, _Mapping]]] = ...) -> None: ...

class EpisodeVideo(_message.Message):
    __slots__ = ("sample", "content")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    content: bytes
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., content: _Optional[bytes] = ...) -> None: ...

class ScoreRequest(_message.Message):
    __slots__ = ("header", "sequences", "distribution", "top")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    DISTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    sequences: _containers.RepeatedCompositeFieldContainer[ScoreSequence]
    distribution: _common_pb2.SamplingDistribution
    top: int
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., sequences: _Optional[_Iterable[_Union[ScoreSequence, _Mapping]]] = ..., distribution: _Optional[_Union[_common_pb2.SamplingDistribution, _Mapping]] = ..., top: _Optional[int] = ...) -> None: ...

class ScoreSequence(_message.Message):
    __slots__ = ("token_ids", "start")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    START_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    start: int
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., start: _Optional[int] = ...) -> None: ...

class ScoreResponse(_message.Message):
    __slots__ = ("sequences", "policy_number")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[ScoredSequence]
    policy_number: int
    def __init__(self, sequences: _Optional[_Iterable[_Union[ScoredSequence, _Mapping]]] = ..., policy_number: _Optional[int] = ...) -> None: ...

class ScoredSequence(_message.Message):
    __slots__ = ("log_probs", "top")
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    TOP_FIELD_NUMBER: _ClassVar[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    top: _containers.RepeatedCompositeFieldContainer[TopTokens]
    def __init__(self, log_probs: _Optional[_Iterable[float]] = ..., top: _Optional[_Iterable[_Union[TopTokens, _Mapping]]] = ...) -> None: ...

class TopTokens(_message.Message):
    __slots__ = ("token_ids", "log_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class InstallPolicyRequest(_message.Message):
    __slots__ = ("header", "version", "manifest", "sources", "files", "in_flight", "prefetch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    FILES_FIELD_NUMBER: _ClassVar[int]
    IN_FLIGHT_FIELD_NUMBER: _ClassVar[int]
    PREFETCH_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    version: _common_pb2.PolicyVersion
    manifest: _common_pb2.WeightManifest
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.WeightSource]
    files: PolicyFiles
    in_flight: bool
    prefetch: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.WeightSource, _Mapping]]] = ..., files: _Optional[_Union[PolicyFiles, _Mapping]] = ..., in_flight: _Optional[bool] = ..., prefetch: _Optional[bool] = ...) -> None: ...

class PolicyFiles(_message.Message):
    __slots__ = ("checkpoint", "policy")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    POLICY_FIELD_NUMBER: _ClassVar[int]
    checkpoint: str
    policy: str
    def __init__(self, checkpoint: _Optional[str] = ..., policy: _Optional[str] = ...) -> None: ...

class InstallPolicyResponse(_message.Message):
    __slots__ = ("version", "transport", "bytes_moved", "transfer_time", "pause_time", "fallbacks")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    BYTES_MOVED_FIELD_NUMBER: _ClassVar[int]
    TRANSFER_TIME_FIELD_NUMBER: _ClassVar[int]
    PAUSE_TIME_FIELD_NUMBER: _ClassVar[int]
    FALLBACKS_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    transport: _common_pb2.WeightTransport
    bytes_moved: int
    transfer_time: _duration_pb2.Duration
    pause_time: _duration_pb2.Duration
    fallbacks: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., transport: _Optional[_Union[_common_pb2.WeightTransport, str]] = ..., bytes_moved: _Optional[int] = ..., transfer_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., pause_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., fallbacks: _Optional[_Iterable[str]] = ...) -> None: ...

class PauseRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class PauseResponse(_message.Message):
    __slots__ = ("partial_count",)
    PARTIAL_COUNT_FIELD_NUMBER: _ClassVar[int]
    partial_count: int
    def __init__(self, partial_count: _Optional[int] = ...) -> None: ...

class ResumeRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class ResumeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class AbortRequest(_message.Message):
    __slots__ = ("header", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.SlotKey]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.SlotKey, _Mapping]]] = ...) -> None: ...

class AbortResponse(_message.Message):
    __slots__ = ("aborted_count",)
    ABORTED_COUNT_FIELD_NUMBER: _ClassVar[int]
    aborted_count: int
    def __init__(self, aborted_count: _Optional[int] = ...) -> None: ...

class SuspendRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class SuspendResponse(_message.Message):
    __slots__ = ("released_bytes", "free_memory_bytes")
    RELEASED_BYTES_FIELD_NUMBER: _ClassVar[int]
    FREE_MEMORY_BYTES_FIELD_NUMBER: _ClassVar[int]
    released_bytes: int
    free_memory_bytes: int
    def __init__(self, released_bytes: _Optional[int] = ..., free_memory_bytes: _Optional[int] = ...) -> None: ...

class WakeRequest(_message.Message):
    __slots__ = ("header", "scope")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SCOPE_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    scope: WakeScope
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., scope: _Optional[_Union[WakeScope, str]] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class ListInventoryRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class ListInventoryResponse(_message.Message):
    __slots__ = ("items",)
    ITEMS_FIELD_NUMBER: _ClassVar[int]
    items: _containers.RepeatedCompositeFieldContainer[InventoryItem]
    def __init__(self, items: _Optional[_Iterable[_Union[InventoryItem, _Mapping]]] = ...) -> None: ...

class InventoryItem(_message.Message):
    __slots__ = ("sample", "attempt", "body_digest", "size_bytes")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    attempt: int
    body_digest: str
    size_bytes: int
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., attempt: _Optional[int] = ..., body_digest: _Optional[str] = ..., size_bytes: _Optional[int] = ...) -> None: ...

class FetchTrajectoriesRequest(_message.Message):
    __slots__ = ("header", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.SlotKey]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.SlotKey, _Mapping]]] = ...) -> None: ...

class FetchTrajectoriesResponse(_message.Message):
    __slots__ = ("trajectories",)
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    trajectories: _containers.RepeatedCompositeFieldContainer[_common_pb2.Trajectory]
    def __init__(self, trajectories: _Optional[_Iterable[_Union[_common_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class ReleaseTrajectoriesRequest(_message.Message):
    __slots__ = ("header", "samples")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    SAMPLES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    samples: _containers.RepeatedCompositeFieldContainer[_common_pb2.SlotKey]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., samples: _Optional[_Iterable[_Union[_common_pb2.SlotKey, _Mapping]]] = ...) -> None: ...

class ReleaseTrajectoriesResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

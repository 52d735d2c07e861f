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

class RewardMode(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    REWARD_MODE_UNSPECIFIED: _ClassVar[RewardMode]
    REWARD_MODE_DENSE: _ClassVar[RewardMode]
    REWARD_MODE_SPARSE: _ClassVar[RewardMode]

class OutcomeStatus(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    OUTCOME_STATUS_UNSPECIFIED: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_OK: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_ENVIRONMENT_LOST: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_REFUSED: _ClassVar[OutcomeStatus]
    OUTCOME_STATUS_REVOKED: _ClassVar[OutcomeStatus]
REWARD_MODE_UNSPECIFIED: RewardMode
REWARD_MODE_DENSE: RewardMode
REWARD_MODE_SPARSE: RewardMode
OUTCOME_STATUS_UNSPECIFIED: OutcomeStatus
OUTCOME_STATUS_OK: OutcomeStatus
OUTCOME_STATUS_ENVIRONMENT_LOST: OutcomeStatus
OUTCOME_STATUS_REFUSED: OutcomeStatus
OUTCOME_STATUS_REVOKED: OutcomeStatus

class ListEnvironmentsRequest(_message.Message):
    __slots__ = ("page_size", "page_token")
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    page_size: int
    page_token: str
    def __init__(self, page_size: _Optional[int] = ..., page_token: _Optional[str] = ...) -> None: ...

class ListEnvironmentsResponse(_message.Message):
    __slots__ = ("environments", "next_page_token")
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedCompositeFieldContainer[Environment]
    next_page_token: str
    def __init__(self, environments: _Optional[_Iterable[_Union[Environment, _Mapping]]] = ..., next_page_token: _Optional[str] = ...) -> None: ...

class Environment(_message.Message):
    __slots__ = ("backend", "name")
    BACKEND_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    backend: str
    name: str
    def __init__(self, backend: _Optional[str] = ..., name: _Optional[str] = ...) -> None: ...

class OpenPoolRequest(_message.Message):
    __slots__ = ("header", "environment", "count", "options_json", "seed", "max_episode_steps", "step_timeout", "reward_mode", "auto_reset", "processes", "blob_bytes", "leased", "without_info", "vectorized", "variables")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    COUNT_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    SEED_FIELD_NUMBER: _ClassVar[int]
    MAX_EPISODE_STEPS_FIELD_NUMBER: _ClassVar[int]
    STEP_TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    REWARD_MODE_FIELD_NUMBER: _ClassVar[int]
    AUTO_RESET_FIELD_NUMBER: _ClassVar[int]
    PROCESSES_FIELD_NUMBER: _ClassVar[int]
    BLOB_BYTES_FIELD_NUMBER: _ClassVar[int]
    LEASED_FIELD_NUMBER: _ClassVar[int]
    WITHOUT_INFO_FIELD_NUMBER: _ClassVar[int]
    VECTORIZED_FIELD_NUMBER: _ClassVar[int]
    VARIABLES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    environment: Environment
    count: int
    options_json: str
    seed: int
    max_episode_steps: int
    step_timeout: _duration_pb2.Duration
    reward_mode: RewardMode
    auto_reset: bool
    processes: int
    blob_bytes: int
    leased: bool
    without_info: bool
    vectorized: bool
    variables: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., environment: _Optional[_Union[Environment, _Mapping]] = ..., count: _Optional[int] = ..., options_json: _Optional[str] = ..., seed: _Optional[int] = ..., max_episode_steps: _Optional[int] = ..., step_timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., reward_mode: _Optional[_Union[RewardMode, str]] = ..., auto_reset: _Optional[bool] = ..., processes: _Optional[int] = ..., blob_bytes: _Optional[int] = ..., leased: _Optional[bool] = ..., without_info: _Optional[bool] = ..., vectorized: _Optional[bool] = ..., variables: _Optional[_Iterable[str]] = ...) -> None: ...

class Space(_message.Message):
    __slots__ = ("name", "data_type", "shape", "low", "high", "categories")
    NAME_FIELD_NUMBER: _ClassVar[int]
    DATA_TYPE_FIELD_NUMBER: _ClassVar[int]
    SHAPE_FIELD_NUMBER: _ClassVar[int]
    LOW_FIELD_NUMBER: _ClassVar[int]
    HIGH_FIELD_NUMBER: _ClassVar[int]
    CATEGORIES_FIELD_NUMBER: _ClassVar[int]
    name: str
    data_type: _common_pb2.DataType
    shape: _containers.RepeatedScalarFieldContainer[int]
    low: _common_pb2.Tensor
    high: _common_pb2.Tensor
    categories: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, name: _Optional[str] = ..., data_type: _Optional[_Union[_common_pb2.DataType, str]] = ..., shape: _Optional[_Iterable[int]] = ..., low: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., high: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., categories: _Optional[_Iterable[int]] = ...) -> None: ...

class OpenPoolResponse(_message.Message):
    __slots__ = ("pool", "pool_incarnation", "observation_spaces", "action_space", "init_state_count", "instruction", "conversation", "roles", "images", "agents", "versions")
    class VersionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: str
        def __init__(self, key: _Optional[str] = ..., value: _Optional[str] = ...) -> None: ...
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_SPACES_FIELD_NUMBER: _ClassVar[int]
    ACTION_SPACE_FIELD_NUMBER: _ClassVar[int]
    INIT_STATE_COUNT_FIELD_NUMBER: _ClassVar[int]
    INSTRUCTION_FIELD_NUMBER: _ClassVar[int]
    CONVERSATION_FIELD_NUMBER: _ClassVar[int]
    ROLES_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    AGENTS_FIELD_NUMBER: _ClassVar[int]
    VERSIONS_FIELD_NUMBER: _ClassVar[int]
    pool: str
    pool_incarnation: str
    observation_spaces: _containers.RepeatedCompositeFieldContainer[Space]
    action_space: Space
    init_state_count: int
    instruction: str
    conversation: bool
    roles: _containers.RepeatedScalarFieldContainer[str]
    images: bool
    agents: bool
    versions: _containers.ScalarMap[str, str]
    def __init__(self, pool: _Optional[str] = ..., pool_incarnation: _Optional[str] = ..., observation_spaces: _Optional[_Iterable[_Union[Space, _Mapping]]] = ..., action_space: _Optional[_Union[Space, _Mapping]] = ..., init_state_count: _Optional[int] = ..., instruction: _Optional[str] = ..., conversation: _Optional[bool] = ..., roles: _Optional[_Iterable[str]] = ..., images: _Optional[bool] = ..., agents: _Optional[bool] = ..., versions: _Optional[_Mapping[str, str]] = ...) -> None: ...

class StepRequest(_message.Message):
    __slots__ = ("header", "pool", "pool_incarnation", "operations", "batch")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    POOL_INCARNATION_FIELD_NUMBER: _ClassVar[int]
    OPERATIONS_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    pool: str
    pool_incarnation: str
    operations: _containers.RepeatedCompositeFieldContainer[EnvironmentOperation]
    batch: ChunkBatch
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., pool: _Optional[str] = ..., pool_incarnation: _Optional[str] = ..., operations: _Optional[_Iterable[_Union[EnvironmentOperation, _Mapping]]] = ..., batch: _Optional[_Union[ChunkBatch, _Mapping]] = ...) -> None: ...

class ChunkBatch(_message.Message):
    __slots__ = ("environments", "step_indices", "action_chunks")
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_INDICES_FIELD_NUMBER: _ClassVar[int]
    ACTION_CHUNKS_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedScalarFieldContainer[int]
    step_indices: _containers.RepeatedScalarFieldContainer[int]
    action_chunks: _common_pb2.Tensor
    def __init__(self, environments: _Optional[_Iterable[int]] = ..., step_indices: _Optional[_Iterable[int]] = ..., action_chunks: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...

class EnvironmentOperation(_message.Message):
    __slots__ = ("environment", "step_index", "reset", "action", "action_chunk", "turn", "await_agent")
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    RESET_FIELD_NUMBER: _ClassVar[int]
    ACTION_FIELD_NUMBER: _ClassVar[int]
    ACTION_CHUNK_FIELD_NUMBER: _ClassVar[int]
    TURN_FIELD_NUMBER: _ClassVar[int]
    AWAIT_AGENT_FIELD_NUMBER: _ClassVar[int]
    environment: int
    step_index: int
    reset: ResetOperation
    action: _common_pb2.Tensor
    action_chunk: _common_pb2.Tensor
    turn: AssistantTurn
    await_agent: AwaitAgent
    def __init__(self, environment: _Optional[int] = ..., step_index: _Optional[int] = ..., reset: _Optional[_Union[ResetOperation, _Mapping]] = ..., action: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., action_chunk: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., turn: _Optional[_Union[AssistantTurn, _Mapping]] = ..., await_agent: _Optional[_Union[AwaitAgent, _Mapping]] = ...) -> None: ...

class AwaitAgent(_message.Message):
    __slots__ = ("wait", "kill")
    WAIT_FIELD_NUMBER: _ClassVar[int]
    KILL_FIELD_NUMBER: _ClassVar[int]
    wait: _duration_pb2.Duration
    kill: bool
    def __init__(self, wait: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ..., kill: _Optional[bool] = ...) -> None: ...

class AssistantTurn(_message.Message):
    __slots__ = ("content",)
    CONTENT_FIELD_NUMBER: _ClassVar[int]
    content: str
    def __init__(self, content: _Optional[str] = ...) -> None: ...

class ResetOperation(_message.Message):
    __slots__ = ("seed", "options_json", "init_state", "record", "until_success")
    SEED_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_JSON_FIELD_NUMBER: _ClassVar[int]
    INIT_STATE_FIELD_NUMBER: _ClassVar[int]
    RECORD_FIELD_NUMBER: _ClassVar[int]
    UNTIL_SUCCESS_FIELD_NUMBER: _ClassVar[int]
    seed: int
    options_json: str
    init_state: int
    record: bool
    until_success: bool
    def __init__(self, seed: _Optional[int] = ..., options_json: _Optional[str] = ..., init_state: _Optional[int] = ..., record: _Optional[bool] = ..., until_success: _Optional[bool] = ...) -> None: ...

class StepResponse(_message.Message):
    __slots__ = ("outcomes", "batch")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    BATCH_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[EnvironmentOutcome]
    batch: OutcomeBatch
    def __init__(self, outcomes: _Optional[_Iterable[_Union[EnvironmentOutcome, _Mapping]]] = ..., batch: _Optional[_Union[OutcomeBatch, _Mapping]] = ...) -> None: ...

class OutcomeBatch(_message.Message):
    __slots__ = ("environments", "step_indices", "observation", "executed_lengths", "rewards", "successes", "terminated", "truncated", "success_reported")
    class ObservationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    STEP_INDICES_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSES_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_REPORTED_FIELD_NUMBER: _ClassVar[int]
    environments: _containers.RepeatedScalarFieldContainer[int]
    step_indices: _containers.RepeatedScalarFieldContainer[int]
    observation: _containers.MessageMap[str, _common_pb2.Tensor]
    executed_lengths: _containers.RepeatedScalarFieldContainer[int]
    rewards: _common_pb2.Tensor
    successes: _common_pb2.Tensor
    terminated: _containers.RepeatedScalarFieldContainer[bool]
    truncated: _containers.RepeatedScalarFieldContainer[bool]
    success_reported: _containers.RepeatedScalarFieldContainer[bool]
    def __init__(self, environments: _Optional[_Iterable[int]] = ..., step_indices: _Optional[_Iterable[int]] = ..., observation: _Optional[_Mapping[str, _common_pb2.Tensor]] = ..., executed_lengths: _Optional[_Iterable[int]] = ..., rewards: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., successes: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., terminated: _Optional[_Iterable[bool]] = ..., truncated: _Optional[_Iterable[bool]] = ..., success_reported: _Optional[_Iterable[bool]] = ...) -> None: ...

class StepLocallyRequest(_message.Message):
    __slots__ = ("pool",)
    POOL_FIELD_NUMBER: _ClassVar[int]
    pool: str
    def __init__(self, pool: _Optional[str] = ...) -> None: ...

class StepLocallyResponse(_message.Message):
    __slots__ = ("socket_path", "ticket", "why_not")
    SOCKET_PATH_FIELD_NUMBER: _ClassVar[int]
    TICKET_FIELD_NUMBER: _ClassVar[int]
    WHY_NOT_FIELD_NUMBER: _ClassVar[int]
    socket_path: str
    ticket: bytes
    why_not: str
    def __init__(self, socket_path: _Optional[str] = ..., ticket: _Optional[bytes] = ..., why_not: _Optional[str] = ...) -> None: ...

class EnvironmentOutcome(_message.Message):
    __slots__ = ("environment", "step_index", "status", "observation", "reward", "terminated", "truncated", "success", "info_json", "detail", "executed_length", "rewards", "successes", "final_observation", "messages", "tools_json", "success_reported", "role_rewards", "interventions", "author")
    class ObservationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class FinalObservationEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: _common_pb2.Tensor
        def __init__(self, key: _Optional[str] = ..., value: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ...) -> None: ...
    class RoleRewardsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    ENVIRONMENT_FIELD_NUMBER: _ClassVar[int]
    STEP_INDEX_FIELD_NUMBER: _ClassVar[int]
    STATUS_FIELD_NUMBER: _ClassVar[int]
    OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TERMINATED_FIELD_NUMBER: _ClassVar[int]
    TRUNCATED_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_FIELD_NUMBER: _ClassVar[int]
    INFO_JSON_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    EXECUTED_LENGTH_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    SUCCESSES_FIELD_NUMBER: _ClassVar[int]
    FINAL_OBSERVATION_FIELD_NUMBER: _ClassVar[int]
    MESSAGES_FIELD_NUMBER: _ClassVar[int]
    TOOLS_JSON_FIELD_NUMBER: _ClassVar[int]
    SUCCESS_REPORTED_FIELD_NUMBER: _ClassVar[int]
    ROLE_REWARDS_FIELD_NUMBER: _ClassVar[int]
    INTERVENTIONS_FIELD_NUMBER: _ClassVar[int]
    AUTHOR_FIELD_NUMBER: _ClassVar[int]
    environment: int
    step_index: int
    status: OutcomeStatus
    observation: _containers.MessageMap[str, _common_pb2.Tensor]
    reward: float
    terminated: bool
    truncated: bool
    success: bool
    info_json: str
    detail: str
    executed_length: int
    rewards: _common_pb2.Tensor
    successes: _common_pb2.Tensor
    final_observation: _containers.MessageMap[str, _common_pb2.Tensor]
    messages: _containers.RepeatedCompositeFieldContainer[_common_pb2.ChatMessage]
    tools_json: str
    success_reported: bool
    role_rewards: _containers.ScalarMap[str, float]
    interventions: _common_pb2.Tensor
    author: str
    def __init__(self, environment: _Optional[int] = ..., step_index: _Optional[int] = ..., status: _Optional[_Union[OutcomeStatus, str]] = ..., observation: _Optional[_Mapping[str, _common_pb2.Tensor]] = ..., reward: _Optional[float] = ..., terminated: _Optional[bool] = ..., truncated: _Optional[bool] = ..., success: _Optional[bool] = ..., info_json: _Optional[str] = ..., detail: _Optional[str] = ..., executed_length: _Optional[int] = ..., rewards: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., successes: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., final_observation: _Optional[_Mapping[str, _common_pb2.Tensor]] = ..., messages: _Optional[_Iterable[_Union[_common_pb2.ChatMessage, _Mapping]]] = ..., tools_json: _Optional[str] = ..., success_reported: _Optional[bool] = ..., role_rewards: _Optional[_Mapping[str, float]] = ..., interventions: _Optional[_Union[_common_pb2.Tensor, _Mapping]] = ..., author: _Optional[str] = ...) -> None: ...

class RenderRequest(_message.Message):
    __slots__ = ("pool", "environments", "video")
    POOL_FIELD_NUMBER: _ClassVar[int]
    ENVIRONMENTS_FIELD_NUMBER: _ClassVar[int]
    VIDEO_FIELD_NUMBER: _ClassVar[int]
    pool: str
    environments: _containers.RepeatedScalarFieldContainer[int]
    video: bool
    def __init__(self, pool: _Optional[str] = ..., environments: _Optional[_Iterable[int]] = ..., video: _Optional[bool] = ...) -> None: ...

class RenderResponse(_message.Message):
    __slots__ = ("frames", "videos")
    FRAMES_FIELD_NUMBER: _ClassVar[int]
    VIDEOS_FIELD_NUMBER: _ClassVar[int]
    frames: _containers.RepeatedCompositeFieldContainer[_common_pb2.Tensor]
    videos: _containers.RepeatedScalarFieldContainer[bytes]
    def __init__(self, frames: _Optional[_Iterable[_Union[_common_pb2.Tensor, _Mapping]]] = ..., videos: _Optional[_Iterable[bytes]] = ...) -> None: ...

class ClosePoolRequest(_message.Message):
    __slots__ = ("header", "pool")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    POOL_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    pool: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., pool: _Optional[str] = ...) -> None: ...

class ClosePoolResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

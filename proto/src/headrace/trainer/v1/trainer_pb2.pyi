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

class Barrier(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    BARRIER_UNSPECIFIED: _ClassVar[Barrier]
    BARRIER_TRAJECTORY: _ClassVar[Barrier]
    BARRIER_GROUP: _ClassVar[Barrier]
    BARRIER_BATCH: _ClassVar[Barrier]

class GroupDisposition(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    GROUP_DISPOSITION_UNSPECIFIED: _ClassVar[GroupDisposition]
    GROUP_DISPOSITION_ACCUMULATED: _ClassVar[GroupDisposition]
    GROUP_DISPOSITION_NONFINITE: _ClassVar[GroupDisposition]
    GROUP_DISPOSITION_STALE: _ClassVar[GroupDisposition]

class CommitResult(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    COMMIT_RESULT_UNSPECIFIED: _ClassVar[CommitResult]
    COMMIT_RESULT_COMMITTED: _ClassVar[CommitResult]
    COMMIT_RESULT_SET_MISMATCH: _ClassVar[CommitResult]
    COMMIT_RESULT_NONFINITE: _ClassVar[CommitResult]

class StepPhase(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    STEP_PHASE_UNSPECIFIED: _ClassVar[StepPhase]
    STEP_PHASE_IDLE: _ClassVar[StepPhase]
    STEP_PHASE_ACCUMULATING: _ClassVar[StepPhase]
    STEP_PHASE_COMMITTED: _ClassVar[StepPhase]

class InferKind(int, metaclass=_enum_type_wrapper.EnumTypeWrapper):
    __slots__ = ()
    INFER_KIND_UNSPECIFIED: _ClassVar[InferKind]
    INFER_KIND_LOG_PROBS: _ClassVar[InferKind]
    INFER_KIND_REFERENCE_LOG_PROBS: _ClassVar[InferKind]
    INFER_KIND_VALUES: _ClassVar[InferKind]
BARRIER_UNSPECIFIED: Barrier
BARRIER_TRAJECTORY: Barrier
BARRIER_GROUP: Barrier
BARRIER_BATCH: Barrier
GROUP_DISPOSITION_UNSPECIFIED: GroupDisposition
GROUP_DISPOSITION_ACCUMULATED: GroupDisposition
GROUP_DISPOSITION_NONFINITE: GroupDisposition
GROUP_DISPOSITION_STALE: GroupDisposition
COMMIT_RESULT_UNSPECIFIED: CommitResult
COMMIT_RESULT_COMMITTED: CommitResult
COMMIT_RESULT_SET_MISMATCH: CommitResult
COMMIT_RESULT_NONFINITE: CommitResult
STEP_PHASE_UNSPECIFIED: StepPhase
STEP_PHASE_IDLE: StepPhase
STEP_PHASE_ACCUMULATING: StepPhase
STEP_PHASE_COMMITTED: StepPhase
INFER_KIND_UNSPECIFIED: InferKind
INFER_KIND_LOG_PROBS: InferKind
INFER_KIND_REFERENCE_LOG_PROBS: InferKind
INFER_KIND_VALUES: InferKind

class OpenRunRequest(_message.Message):
    __slots__ = ("header", "config_json", "run_directory")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CONFIG_JSON_FIELD_NUMBER: _ClassVar[int]
    RUN_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    config_json: str
    run_directory: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., config_json: _Optional[str] = ..., run_directory: _Optional[str] = ...) -> None: ...

class OpenRunResponse(_message.Message):
    __slots__ = ("barrier", "drop_equal", "max_refill", "greedy_first", "by_turn", "given_rewards", "given_by_token")
    BARRIER_FIELD_NUMBER: _ClassVar[int]
    DROP_EQUAL_FIELD_NUMBER: _ClassVar[int]
    MAX_REFILL_FIELD_NUMBER: _ClassVar[int]
    GREEDY_FIRST_FIELD_NUMBER: _ClassVar[int]
    BY_TURN_FIELD_NUMBER: _ClassVar[int]
    GIVEN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    GIVEN_BY_TOKEN_FIELD_NUMBER: _ClassVar[int]
    barrier: Barrier
    drop_equal: bool
    max_refill: int
    greedy_first: bool
    by_turn: bool
    given_rewards: _containers.RepeatedScalarFieldContainer[InferKind]
    given_by_token: bool
    def __init__(self, barrier: _Optional[_Union[Barrier, str]] = ..., drop_equal: _Optional[bool] = ..., max_refill: _Optional[int] = ..., greedy_first: _Optional[bool] = ..., by_turn: _Optional[bool] = ..., given_rewards: _Optional[_Iterable[_Union[InferKind, str]]] = ..., given_by_token: _Optional[bool] = ...) -> None: ...

class CloseRunRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class CloseRunResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class JoinTrainerGroupRequest(_message.Message):
    __slots__ = ("header", "generation", "rank", "world_size", "rendezvous", "timeout")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    RANK_FIELD_NUMBER: _ClassVar[int]
    WORLD_SIZE_FIELD_NUMBER: _ClassVar[int]
    RENDEZVOUS_FIELD_NUMBER: _ClassVar[int]
    TIMEOUT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    generation: int
    rank: int
    world_size: int
    rendezvous: str
    timeout: _duration_pb2.Duration
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., generation: _Optional[int] = ..., rank: _Optional[int] = ..., world_size: _Optional[int] = ..., rendezvous: _Optional[str] = ..., timeout: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class JoinTrainerGroupResponse(_message.Message):
    __slots__ = ("generation",)
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    generation: int
    def __init__(self, generation: _Optional[int] = ...) -> None: ...

class LeaveTrainerGroupRequest(_message.Message):
    __slots__ = ("header", "generation", "carry")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CARRY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    generation: int
    carry: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., generation: _Optional[int] = ..., carry: _Optional[bool] = ...) -> None: ...

class LeaveTrainerGroupResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class RestoreRequest(_message.Message):
    __slots__ = ("header", "checkpoint", "number", "store_id", "source_run_directory", "carried", "weights_only")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RUN_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    CARRIED_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_ONLY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    checkpoint: str
    number: int
    store_id: str
    source_run_directory: str
    carried: bool
    weights_only: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., checkpoint: _Optional[str] = ..., number: _Optional[int] = ..., store_id: _Optional[str] = ..., source_run_directory: _Optional[str] = ..., carried: _Optional[bool] = ..., weights_only: _Optional[bool] = ...) -> None: ...

class RestoreResponse(_message.Message):
    __slots__ = ("version", "warmup_steps", "figures", "layout", "notes")
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    VERSION_FIELD_NUMBER: _ClassVar[int]
    WARMUP_STEPS_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    LAYOUT_FIELD_NUMBER: _ClassVar[int]
    NOTES_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    warmup_steps: int
    figures: _containers.ScalarMap[str, float]
    layout: str
    notes: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., warmup_steps: _Optional[int] = ..., figures: _Optional[_Mapping[str, float]] = ..., layout: _Optional[str] = ..., notes: _Optional[_Iterable[str]] = ...) -> None: ...

class BeginStepRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "base_number", "next_number")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    base_number: int
    next_number: int
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., base_number: _Optional[int] = ..., next_number: _Optional[int] = ...) -> None: ...

class BeginStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class LearnRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "groups")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    groups: _containers.RepeatedCompositeFieldContainer[SettledGroup]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., groups: _Optional[_Iterable[_Union[SettledGroup, _Mapping]]] = ...) -> None: ...

class SettledGroup(_message.Message):
    __slots__ = ("prompt_ordinal", "members", "images", "rated")
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    IMAGES_FIELD_NUMBER: _ClassVar[int]
    RATED_FIELD_NUMBER: _ClassVar[int]
    prompt_ordinal: int
    members: _containers.RepeatedCompositeFieldContainer[SettledTrajectory]
    images: _containers.RepeatedCompositeFieldContainer[_common_pb2.Image]
    rated: bool
    def __init__(self, prompt_ordinal: _Optional[int] = ..., members: _Optional[_Iterable[_Union[SettledTrajectory, _Mapping]]] = ..., images: _Optional[_Iterable[_Union[_common_pb2.Image, _Mapping]]] = ..., rated: _Optional[bool] = ...) -> None: ...

class SettledTrajectory(_message.Message):
    __slots__ = ("trajectory", "reward", "turn_rewards", "masked", "oldest_version")
    TRAJECTORY_FIELD_NUMBER: _ClassVar[int]
    REWARD_FIELD_NUMBER: _ClassVar[int]
    TURN_REWARDS_FIELD_NUMBER: _ClassVar[int]
    MASKED_FIELD_NUMBER: _ClassVar[int]
    OLDEST_VERSION_FIELD_NUMBER: _ClassVar[int]
    trajectory: _common_pb2.Trajectory
    reward: float
    turn_rewards: _containers.RepeatedScalarFieldContainer[float]
    masked: bool
    oldest_version: _common_pb2.PolicyVersion
    def __init__(self, trajectory: _Optional[_Union[_common_pb2.Trajectory, _Mapping]] = ..., reward: _Optional[float] = ..., turn_rewards: _Optional[_Iterable[float]] = ..., masked: _Optional[bool] = ..., oldest_version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class LearnResponse(_message.Message):
    __slots__ = ("outcomes", "metrics", "revoked")
    OUTCOMES_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    REVOKED_FIELD_NUMBER: _ClassVar[int]
    outcomes: _containers.RepeatedCompositeFieldContainer[GroupOutcome]
    metrics: _common_pb2.StageMetrics
    revoked: bool
    def __init__(self, outcomes: _Optional[_Iterable[_Union[GroupOutcome, _Mapping]]] = ..., metrics: _Optional[_Union[_common_pb2.StageMetrics, _Mapping]] = ..., revoked: _Optional[bool] = ...) -> None: ...

class GroupOutcome(_message.Message):
    __slots__ = ("prompt_ordinal", "disposition", "digest", "detail", "advantages")
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    DISPOSITION_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    DETAIL_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    prompt_ordinal: int
    disposition: GroupDisposition
    digest: str
    detail: str
    advantages: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, prompt_ordinal: _Optional[int] = ..., disposition: _Optional[_Union[GroupDisposition, str]] = ..., digest: _Optional[str] = ..., detail: _Optional[str] = ..., advantages: _Optional[_Iterable[float]] = ...) -> None: ...

class ComputeLossRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "prompt_ordinal", "slot_attempt", "sequences", "loss", "options", "learn", "digest")
    class OptionsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    SLOT_ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    OPTIONS_FIELD_NUMBER: _ClassVar[int]
    LEARN_FIELD_NUMBER: _ClassVar[int]
    DIGEST_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    prompt_ordinal: int
    slot_attempt: int
    sequences: _containers.RepeatedCompositeFieldContainer[LossSequence]
    loss: str
    options: _containers.ScalarMap[str, float]
    learn: bool
    digest: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., prompt_ordinal: _Optional[int] = ..., slot_attempt: _Optional[int] = ..., sequences: _Optional[_Iterable[_Union[LossSequence, _Mapping]]] = ..., loss: _Optional[str] = ..., options: _Optional[_Mapping[str, float]] = ..., learn: _Optional[bool] = ..., digest: _Optional[str] = ...) -> None: ...

class LossSequence(_message.Message):
    __slots__ = ("token_ids", "targets", "weights", "advantages", "log_probs")
    TOKEN_IDS_FIELD_NUMBER: _ClassVar[int]
    TARGETS_FIELD_NUMBER: _ClassVar[int]
    WEIGHTS_FIELD_NUMBER: _ClassVar[int]
    ADVANTAGES_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    token_ids: _containers.RepeatedScalarFieldContainer[int]
    targets: _containers.RepeatedScalarFieldContainer[int]
    weights: _containers.RepeatedScalarFieldContainer[float]
    advantages: _containers.RepeatedScalarFieldContainer[float]
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, token_ids: _Optional[_Iterable[int]] = ..., targets: _Optional[_Iterable[int]] = ..., weights: _Optional[_Iterable[float]] = ..., advantages: _Optional[_Iterable[float]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class ComputeLossResponse(_message.Message):
    __slots__ = ("sequences", "loss", "finite", "policy_number", "metrics")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    LOSS_FIELD_NUMBER: _ClassVar[int]
    FINITE_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    METRICS_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[InferredSequence]
    loss: float
    finite: bool
    policy_number: int
    metrics: _common_pb2.StageMetrics
    def __init__(self, sequences: _Optional[_Iterable[_Union[InferredSequence, _Mapping]]] = ..., loss: _Optional[float] = ..., finite: _Optional[bool] = ..., policy_number: _Optional[int] = ..., metrics: _Optional[_Union[_common_pb2.StageMetrics, _Mapping]] = ...) -> None: ...

class AdamParams(_message.Message):
    __slots__ = ("learning_rate", "beta1", "beta2", "eps", "weight_decay", "grad_clip_norm")
    LEARNING_RATE_FIELD_NUMBER: _ClassVar[int]
    BETA1_FIELD_NUMBER: _ClassVar[int]
    BETA2_FIELD_NUMBER: _ClassVar[int]
    EPS_FIELD_NUMBER: _ClassVar[int]
    WEIGHT_DECAY_FIELD_NUMBER: _ClassVar[int]
    GRAD_CLIP_NORM_FIELD_NUMBER: _ClassVar[int]
    learning_rate: float
    beta1: float
    beta2: float
    eps: float
    weight_decay: float
    grad_clip_norm: float
    def __init__(self, learning_rate: _Optional[float] = ..., beta1: _Optional[float] = ..., beta2: _Optional[float] = ..., eps: _Optional[float] = ..., weight_decay: _Optional[float] = ..., grad_clip_norm: _Optional[float] = ...) -> None: ...

class CommitStepRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "base_number", "next_number", "set_digest", "step_manifest", "adam")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    SET_DIGEST_FIELD_NUMBER: _ClassVar[int]
    STEP_MANIFEST_FIELD_NUMBER: _ClassVar[int]
    ADAM_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    base_number: int
    next_number: int
    set_digest: str
    step_manifest: bytes
    adam: AdamParams
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., base_number: _Optional[int] = ..., next_number: _Optional[int] = ..., set_digest: _Optional[str] = ..., step_manifest: _Optional[bytes] = ..., adam: _Optional[_Union[AdamParams, _Mapping]] = ...) -> None: ...

class CommitStepResponse(_message.Message):
    __slots__ = ("result", "version", "group_count", "sequence_count", "token_count", "max_staleness", "tokens_by_version", "figures", "rated")
    class TokensByVersionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    class FiguresEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    RESULT_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    GROUP_COUNT_FIELD_NUMBER: _ClassVar[int]
    SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    MAX_STALENESS_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_VERSION_FIELD_NUMBER: _ClassVar[int]
    FIGURES_FIELD_NUMBER: _ClassVar[int]
    RATED_FIELD_NUMBER: _ClassVar[int]
    result: CommitResult
    version: _common_pb2.PolicyVersion
    group_count: int
    sequence_count: int
    token_count: int
    max_staleness: int
    tokens_by_version: _containers.ScalarMap[int, int]
    figures: _containers.ScalarMap[str, float]
    rated: _containers.RepeatedCompositeFieldContainer[RatedTrajectory]
    def __init__(self, result: _Optional[_Union[CommitResult, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., group_count: _Optional[int] = ..., sequence_count: _Optional[int] = ..., token_count: _Optional[int] = ..., max_staleness: _Optional[int] = ..., tokens_by_version: _Optional[_Mapping[int, int]] = ..., figures: _Optional[_Mapping[str, float]] = ..., rated: _Optional[_Iterable[_Union[RatedTrajectory, _Mapping]]] = ...) -> None: ...

class RatedTrajectory(_message.Message):
    __slots__ = ("sample", "log_probs")
    SAMPLE_FIELD_NUMBER: _ClassVar[int]
    LOG_PROBS_FIELD_NUMBER: _ClassVar[int]
    sample: _common_pb2.SlotKey
    log_probs: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, sample: _Optional[_Union[_common_pb2.SlotKey, _Mapping]] = ..., log_probs: _Optional[_Iterable[float]] = ...) -> None: ...

class RecordStepRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "number", "publish")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    number: int
    publish: bool
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., number: _Optional[int] = ..., publish: _Optional[bool] = ...) -> None: ...

class RecordStepResponse(_message.Message):
    __slots__ = ("published",)
    PUBLISHED_FIELD_NUMBER: _ClassVar[int]
    published: PublishPolicyResponse
    def __init__(self, published: _Optional[_Union[PublishPolicyResponse, _Mapping]] = ...) -> None: ...

class AbortStepRequest(_message.Message):
    __slots__ = ("header", "step", "attempt")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class AbortStepResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

class GetStepStateRequest(_message.Message):
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class GetStepStateResponse(_message.Message):
    __slots__ = ("phase", "version", "step", "attempt", "accumulated_prompts", "commit", "generation", "carried_number")
    PHASE_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    ACCUMULATED_PROMPTS_FIELD_NUMBER: _ClassVar[int]
    COMMIT_FIELD_NUMBER: _ClassVar[int]
    GENERATION_FIELD_NUMBER: _ClassVar[int]
    CARRIED_NUMBER_FIELD_NUMBER: _ClassVar[int]
    phase: StepPhase
    version: _common_pb2.PolicyVersion
    step: int
    attempt: int
    accumulated_prompts: _containers.RepeatedScalarFieldContainer[int]
    commit: CommitStepResponse
    generation: int
    carried_number: int
    def __init__(self, phase: _Optional[_Union[StepPhase, str]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., accumulated_prompts: _Optional[_Iterable[int]] = ..., commit: _Optional[_Union[CommitStepResponse, _Mapping]] = ..., generation: _Optional[int] = ..., carried_number: _Optional[int] = ...) -> None: ...

class InferRequest(_message.Message):
    __slots__ = ("header", "kind", "trajectories")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    KIND_FIELD_NUMBER: _ClassVar[int]
    TRAJECTORIES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    kind: InferKind
    trajectories: _containers.RepeatedCompositeFieldContainer[_common_pb2.Trajectory]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., kind: _Optional[_Union[InferKind, str]] = ..., trajectories: _Optional[_Iterable[_Union[_common_pb2.Trajectory, _Mapping]]] = ...) -> None: ...

class InferResponse(_message.Message):
    __slots__ = ("sequences", "policy_number")
    SEQUENCES_FIELD_NUMBER: _ClassVar[int]
    POLICY_NUMBER_FIELD_NUMBER: _ClassVar[int]
    sequences: _containers.RepeatedCompositeFieldContainer[InferredSequence]
    policy_number: int
    def __init__(self, sequences: _Optional[_Iterable[_Union[InferredSequence, _Mapping]]] = ..., policy_number: _Optional[int] = ...) -> None: ...

class InferredSequence(_message.Message):
    __slots__ = ("values",)
    VALUES_FIELD_NUMBER: _ClassVar[int]
    values: _containers.RepeatedScalarFieldContainer[float]
    def __init__(self, values: _Optional[_Iterable[float]] = ...) -> None: ...

class PublishPolicyRequest(_message.Message):
    __slots__ = ("header", "number")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    number: int
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., number: _Optional[int] = ...) -> None: ...

class PublishPolicyResponse(_message.Message):
    __slots__ = ("version", "manifest", "source", "publish_time")
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    PUBLISH_TIME_FIELD_NUMBER: _ClassVar[int]
    version: _common_pb2.PolicyVersion
    manifest: _common_pb2.WeightManifest
    source: _common_pb2.WeightSource
    publish_time: _duration_pb2.Duration
    def __init__(self, version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.WeightSource, _Mapping]] = ..., publish_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class SaveCheckpointRequest(_message.Message):
    __slots__ = ("header", "number", "wait", "ledger", "retained_checkpoints")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NUMBER_FIELD_NUMBER: _ClassVar[int]
    WAIT_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    RETAINED_CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    number: int
    wait: bool
    ledger: bytes
    retained_checkpoints: _containers.RepeatedScalarFieldContainer[str]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., number: _Optional[int] = ..., wait: _Optional[bool] = ..., ledger: _Optional[bytes] = ..., retained_checkpoints: _Optional[_Iterable[str]] = ...) -> None: ...

class Checkpoint(_message.Message):
    __slots__ = ("name", "version", "ledger", "size_bytes", "store_id")
    NAME_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    LEDGER_FIELD_NUMBER: _ClassVar[int]
    SIZE_BYTES_FIELD_NUMBER: _ClassVar[int]
    STORE_ID_FIELD_NUMBER: _ClassVar[int]
    name: str
    version: _common_pb2.PolicyVersion
    ledger: bytes
    size_bytes: int
    store_id: str
    def __init__(self, name: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., ledger: _Optional[bytes] = ..., size_bytes: _Optional[int] = ..., store_id: _Optional[str] = ...) -> None: ...

class SaveCheckpointResponse(_message.Message):
    __slots__ = ("checkpoint", "durable", "snapshot_time")
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    DURABLE_FIELD_NUMBER: _ClassVar[int]
    SNAPSHOT_TIME_FIELD_NUMBER: _ClassVar[int]
    checkpoint: Checkpoint
    durable: bool
    snapshot_time: _duration_pb2.Duration
    def __init__(self, checkpoint: _Optional[_Union[Checkpoint, _Mapping]] = ..., durable: _Optional[bool] = ..., snapshot_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class ListCheckpointsRequest(_message.Message):
    __slots__ = ("header", "page_size", "page_token", "source_run_directory")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    PAGE_SIZE_FIELD_NUMBER: _ClassVar[int]
    PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RUN_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    page_size: int
    page_token: str
    source_run_directory: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., page_size: _Optional[int] = ..., page_token: _Optional[str] = ..., source_run_directory: _Optional[str] = ...) -> None: ...

class SetAsideCheckpoint(_message.Message):
    __slots__ = ("name", "reason", "set_aside_as")
    NAME_FIELD_NUMBER: _ClassVar[int]
    REASON_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_AS_FIELD_NUMBER: _ClassVar[int]
    name: str
    reason: str
    set_aside_as: str
    def __init__(self, name: _Optional[str] = ..., reason: _Optional[str] = ..., set_aside_as: _Optional[str] = ...) -> None: ...

class ListCheckpointsResponse(_message.Message):
    __slots__ = ("checkpoints", "next_page_token", "last_failure", "set_aside")
    CHECKPOINTS_FIELD_NUMBER: _ClassVar[int]
    NEXT_PAGE_TOKEN_FIELD_NUMBER: _ClassVar[int]
    LAST_FAILURE_FIELD_NUMBER: _ClassVar[int]
    SET_ASIDE_FIELD_NUMBER: _ClassVar[int]
    checkpoints: _containers.RepeatedCompositeFieldContainer[Checkpoint]
    next_page_token: str
    last_failure: str
    set_aside: _containers.RepeatedCompositeFieldContainer[SetAsideCheckpoint]
    def __init__(self, checkpoints: _Optional[_Iterable[_Union[Checkpoint, _Mapping]]] = ..., next_page_token: _Optional[str] = ..., last_failure: _Optional[str] = ..., set_aside: _Optional[_Iterable[_Union[SetAsideCheckpoint, _Mapping]]] = ...) -> None: ...

class FetchLedgerRequest(_message.Message):
    __slots__ = ("header", "checkpoint", "source_run_directory")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    CHECKPOINT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_RUN_DIRECTORY_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    checkpoint: str
    source_run_directory: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., checkpoint: _Optional[str] = ..., source_run_directory: _Optional[str] = ...) -> None: ...

class FetchLedgerResponse(_message.Message):
    __slots__ = ("data",)
    DATA_FIELD_NUMBER: _ClassVar[int]
    data: bytes
    def __init__(self, data: _Optional[bytes] = ...) -> None: ...

class ExportModelRequest(_message.Message):
    __slots__ = ("header", "name")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    name: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., name: _Optional[str] = ...) -> None: ...

class ExportModelResponse(_message.Message):
    __slots__ = ("path", "version")
    PATH_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    path: str
    version: _common_pb2.PolicyVersion
    def __init__(self, path: _Optional[str] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ...) -> None: ...

class HelpRequest(_message.Message):
    __slots__ = ("header", "version", "manifest", "sources")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    VERSION_FIELD_NUMBER: _ClassVar[int]
    MANIFEST_FIELD_NUMBER: _ClassVar[int]
    SOURCES_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    version: _common_pb2.PolicyVersion
    manifest: _common_pb2.WeightManifest
    sources: _containers.RepeatedCompositeFieldContainer[_common_pb2.WeightSource]
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., version: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., manifest: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ..., sources: _Optional[_Iterable[_Union[_common_pb2.WeightSource, _Mapping]]] = ...) -> None: ...

class HelpResponse(_message.Message):
    __slots__ = ("transport", "load_time")
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    LOAD_TIME_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.WeightTransport
    load_time: _duration_pb2.Duration
    def __init__(self, transport: _Optional[_Union[_common_pb2.WeightTransport, str]] = ..., load_time: _Optional[_Union[datetime.timedelta, _duration_pb2.Duration, _Mapping]] = ...) -> None: ...

class AccumulatedMember(_message.Message):
    __slots__ = ("sample_index", "attempt", "body_digest")
    SAMPLE_INDEX_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BODY_DIGEST_FIELD_NUMBER: _ClassVar[int]
    sample_index: int
    attempt: int
    body_digest: str
    def __init__(self, sample_index: _Optional[int] = ..., attempt: _Optional[int] = ..., body_digest: _Optional[str] = ...) -> None: ...

class AccumulatedGroup(_message.Message):
    __slots__ = ("prompt_ordinal", "members", "trained_sequence_count", "token_count", "all_equal", "tokens_by_version", "rewards", "answer_lengths")
    class TokensByVersionEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: int
        value: int
        def __init__(self, key: _Optional[int] = ..., value: _Optional[int] = ...) -> None: ...
    PROMPT_ORDINAL_FIELD_NUMBER: _ClassVar[int]
    MEMBERS_FIELD_NUMBER: _ClassVar[int]
    TRAINED_SEQUENCE_COUNT_FIELD_NUMBER: _ClassVar[int]
    TOKEN_COUNT_FIELD_NUMBER: _ClassVar[int]
    ALL_EQUAL_FIELD_NUMBER: _ClassVar[int]
    TOKENS_BY_VERSION_FIELD_NUMBER: _ClassVar[int]
    REWARDS_FIELD_NUMBER: _ClassVar[int]
    ANSWER_LENGTHS_FIELD_NUMBER: _ClassVar[int]
    prompt_ordinal: int
    members: _containers.RepeatedCompositeFieldContainer[AccumulatedMember]
    trained_sequence_count: int
    token_count: int
    all_equal: bool
    tokens_by_version: _containers.ScalarMap[int, int]
    rewards: _containers.RepeatedScalarFieldContainer[float]
    answer_lengths: _containers.RepeatedScalarFieldContainer[int]
    def __init__(self, prompt_ordinal: _Optional[int] = ..., members: _Optional[_Iterable[_Union[AccumulatedMember, _Mapping]]] = ..., trained_sequence_count: _Optional[int] = ..., token_count: _Optional[int] = ..., all_equal: _Optional[bool] = ..., tokens_by_version: _Optional[_Mapping[int, int]] = ..., rewards: _Optional[_Iterable[float]] = ..., answer_lengths: _Optional[_Iterable[int]] = ...) -> None: ...

class Contribution(_message.Message):
    __slots__ = ("step", "attempt", "base", "next_number", "name", "gradient", "source", "groups", "token_sums", "token_maxima")
    class TokenSumsEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    class TokenMaximaEntry(_message.Message):
        __slots__ = ("key", "value")
        KEY_FIELD_NUMBER: _ClassVar[int]
        VALUE_FIELD_NUMBER: _ClassVar[int]
        key: str
        value: float
        def __init__(self, key: _Optional[str] = ..., value: _Optional[float] = ...) -> None: ...
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    BASE_FIELD_NUMBER: _ClassVar[int]
    NEXT_NUMBER_FIELD_NUMBER: _ClassVar[int]
    NAME_FIELD_NUMBER: _ClassVar[int]
    GRADIENT_FIELD_NUMBER: _ClassVar[int]
    SOURCE_FIELD_NUMBER: _ClassVar[int]
    GROUPS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_SUMS_FIELD_NUMBER: _ClassVar[int]
    TOKEN_MAXIMA_FIELD_NUMBER: _ClassVar[int]
    step: int
    attempt: int
    base: _common_pb2.PolicyVersion
    next_number: int
    name: str
    gradient: _common_pb2.WeightManifest
    source: _common_pb2.WeightSource
    groups: _containers.RepeatedCompositeFieldContainer[AccumulatedGroup]
    token_sums: _containers.ScalarMap[str, float]
    token_maxima: _containers.ScalarMap[str, float]
    def __init__(self, step: _Optional[int] = ..., attempt: _Optional[int] = ..., base: _Optional[_Union[_common_pb2.PolicyVersion, _Mapping]] = ..., next_number: _Optional[int] = ..., name: _Optional[str] = ..., gradient: _Optional[_Union[_common_pb2.WeightManifest, _Mapping]] = ..., source: _Optional[_Union[_common_pb2.WeightSource, _Mapping]] = ..., groups: _Optional[_Iterable[_Union[AccumulatedGroup, _Mapping]]] = ..., token_sums: _Optional[_Mapping[str, float]] = ..., token_maxima: _Optional[_Mapping[str, float]] = ...) -> None: ...

class TakeContributionRequest(_message.Message):
    __slots__ = ("header", "step", "attempt")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ...) -> None: ...

class TakeContributionResponse(_message.Message):
    __slots__ = ("contribution",)
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    contribution: Contribution
    def __init__(self, contribution: _Optional[_Union[Contribution, _Mapping]] = ...) -> None: ...

class AddContributionRequest(_message.Message):
    __slots__ = ("header", "step", "attempt", "contribution", "helper")
    HEADER_FIELD_NUMBER: _ClassVar[int]
    STEP_FIELD_NUMBER: _ClassVar[int]
    ATTEMPT_FIELD_NUMBER: _ClassVar[int]
    CONTRIBUTION_FIELD_NUMBER: _ClassVar[int]
    HELPER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    step: int
    attempt: int
    contribution: Contribution
    helper: str
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ..., step: _Optional[int] = ..., attempt: _Optional[int] = ..., contribution: _Optional[_Union[Contribution, _Mapping]] = ..., helper: _Optional[str] = ...) -> None: ...

class AddContributionResponse(_message.Message):
    __slots__ = ("transport",)
    TRANSPORT_FIELD_NUMBER: _ClassVar[int]
    transport: _common_pb2.WeightTransport
    def __init__(self, transport: _Optional[_Union[_common_pb2.WeightTransport, str]] = ...) -> None: ...

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
    __slots__ = ("header",)
    HEADER_FIELD_NUMBER: _ClassVar[int]
    header: _common_pb2.CommandHeader
    def __init__(self, header: _Optional[_Union[_common_pb2.CommandHeader, _Mapping]] = ...) -> None: ...

class WakeResponse(_message.Message):
    __slots__ = ()
    def __init__(self) -> None: ...

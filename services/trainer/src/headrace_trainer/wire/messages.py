"""Messages to and from the trainer's own records. Checks that they are well formed; decides nothing else."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from google.protobuf import duration_pb2
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2

from headrace_trainer.algorithms._base import OLD_LOG_PROBS, REFERENCE_LOG_PROBS, VALUES
from headrace_trainer.checkpoints.asides import SetAside
from headrace_trainer.checkpoints.tree import Saved
from headrace_trainer.learning.samples import Disposition, GroupRecord
from headrace_trainer.learning.step import CommitReply, Phase, Result, Version

_DISPOSITIONS = {
    Disposition.ACCUMULATED: trainer_pb2.GROUP_DISPOSITION_ACCUMULATED,
    Disposition.NONFINITE: trainer_pb2.GROUP_DISPOSITION_NONFINITE,
    Disposition.STALE: trainer_pb2.GROUP_DISPOSITION_STALE,
}
_RESULTS = {
    Result.COMMITTED: trainer_pb2.COMMIT_RESULT_COMMITTED,
    Result.SET_MISMATCH: trainer_pb2.COMMIT_RESULT_SET_MISMATCH,
    Result.NONFINITE: trainer_pb2.COMMIT_RESULT_NONFINITE,
}
PHASES = {
    Phase.EMPTY: trainer_pb2.STEP_PHASE_UNSPECIFIED,
    Phase.IDLE: trainer_pb2.STEP_PHASE_IDLE,
    Phase.ACCUMULATING: trainer_pb2.STEP_PHASE_ACCUMULATING,
    Phase.COMMITTED: trainer_pb2.STEP_PHASE_COMMITTED,
}

COLUMNS = {
    trainer_pb2.INFER_KIND_LOG_PROBS: OLD_LOG_PROBS,
    trainer_pb2.INFER_KIND_REFERENCE_LOG_PROBS: REFERENCE_LOG_PROBS,
    trainer_pb2.INFER_KIND_VALUES: VALUES,
}
"""What Infer serves, by the column that is its answer."""


def infer_kinds(columns: Sequence[str]) -> list[trainer_pb2.InferKind]:
    """What Infer serves columns as."""
    kinds = {column: kind for kind, column in COLUMNS.items()}
    return [kinds[column] for column in columns]


def outcome(record: GroupRecord) -> trainer_pb2.GroupOutcome:
    """What became of a group."""
    return trainer_pb2.GroupOutcome(
        prompt_ordinal=record.prompt_ordinal,
        disposition=_DISPOSITIONS[record.disposition],
        digest=record.digest,
        detail=record.detail,
        advantages=record.advantages,
    )


def version_message(version: Version | None) -> common_pb2.PolicyVersion | None:
    """A version, or None."""
    if version is None:
        return None
    return common_pb2.PolicyVersion(
        number=version.number, parent=version.parent, ordinal=version.ordinal, digest=version.digest
    )


MOST_RATED = 1024
"""Tokens of a trajectory that a commit says something of."""


def commit_message(reply: CommitReply | None) -> trainer_pb2.CommitStepResponse | None:
    """A commit's reply, or None."""
    if reply is None:
        return None
    return trainer_pb2.CommitStepResponse(
        result=_RESULTS[reply.result],
        version=version_message(reply.version),
        group_count=reply.groups,
        sequence_count=reply.sequences,
        token_count=reply.tokens,
        max_staleness=reply.max_staleness,
        tokens_by_version=dict(reply.tokens_by_version),
        figures=dict(reply.figures),
        rated=[
            trainer_pb2.RatedTrajectory(
                sample=common_pb2.SlotKey(prompt_ordinal=prompt, sample_index=sample),
                log_probs=log_probs[:MOST_RATED],
            )
            for (prompt, sample), log_probs in sorted(reply.rated.items())
        ],
    )


def checkpoint_message(saved: Saved) -> trainer_pb2.Checkpoint:
    """A checkpoint; FetchLedger gives its ledger."""
    return trainer_pb2.Checkpoint(
        name=saved.name,
        version=version_message(saved.version),
        size_bytes=saved.size,
        store_id=saved.store_id,
    )


def set_aside_message(found: SetAside) -> trainer_pb2.SetAsideCheckpoint:
    """A damaged checkpoint."""
    return trainer_pb2.SetAsideCheckpoint(
        name=found.name, reason=found.reason, set_aside_as=found.set_aside_as
    )


def duration(seconds: float) -> duration_pb2.Duration:
    """Seconds as a Duration."""
    message = duration_pb2.Duration()
    message.FromNanoseconds(int(seconds * 1e9))
    return message


def metrics(stage: str, seconds: float, groups: Iterable[GroupRecord]) -> common_pb2.StageMetrics:
    """One execution of a stage over groups."""
    records = list(groups)
    return common_pb2.StageMetrics(
        stage=stage,
        wall_time=duration(seconds),
        items=sum(record.sequences for record in records),
        tokens=sum(record.tokens for record in records),
    )

"""Chunks of several environments as one message, and as the operations and outcomes that they are the same as."""

from __future__ import annotations

from collections.abc import Iterable

from headrace.simulator.v1 import simulator_pb2
from headrace_servicekit.rpc.errors import ServiceError, invalid
from headrace_servicekit.rpc.tensors import decode_tensor, write_tensor

from headrace_simulator.spaces import ArraySpace, chunk_fault, in_shape

MAX_BATCH_BYTES = 64 * 1024 * 1024
ChunkBatch = simulator_pb2.ChunkBatch
OutcomeBatch = simulator_pb2.OutcomeBatch
Operation = simulator_pb2.EnvironmentOperation
Outcome = simulator_pb2.EnvironmentOutcome


def check_batch(batch: ChunkBatch) -> None:
    """Raises ServiceError INVALID where a batch has not one step index and one chunk for each of its environments."""
    count, shape = len(batch.environments), batch.action_chunks.shape
    if not count and not shape:
        return
    if len(batch.step_indices) != count or len(shape) < 2 or shape[0] != count:
        raise invalid(
            f"batch: {count} environments, {len(batch.step_indices)} step_indices and action_chunks of shape "
            f"{list(shape)}; give one of each"
        )


def is_valid(batch: ChunkBatch, space: ArraySpace) -> bool:
    """Whether every action of it lies in the space."""
    try:
        chunks = decode_tensor(batch.action_chunks, max_bytes=MAX_BATCH_BYTES)
    except ServiceError:
        return False
    actions = in_shape(space, chunks.reshape(-1, *chunks.shape[2:]), chunk=True)
    return chunk_fault(space, actions) is None


def operations_of(batch: ChunkBatch, rows: Iterable[int] | None = None) -> list[Operation]:
    """Rows as operations (None: all). Raises ServiceError INVALID for chunks that are no tensor."""
    chunks = decode_tensor(batch.action_chunks, max_bytes=MAX_BATCH_BYTES)
    found = []
    for row in range(len(chunks)) if rows is None else rows:
        operation = Operation(environment=batch.environments[row], step_index=batch.step_indices[row])
        write_tensor(operation.action_chunk, chunks[row])
        found.append(operation)
    return found


def outcome_of(batch: OutcomeBatch, row: int) -> Outcome:
    """A row as an outcome."""
    executed = batch.executed_lengths[row]
    rewards = decode_tensor(batch.rewards, max_bytes=MAX_BATCH_BYTES)[row, :executed]
    successes = decode_tensor(batch.successes, max_bytes=MAX_BATCH_BYTES)[row, :executed]
    outcome = Outcome(
        environment=batch.environments[row],
        step_index=batch.step_indices[row],
        status=simulator_pb2.OUTCOME_STATUS_OK,
        reward=float(sum(rewards)),
        success=bool(successes.any()),
        terminated=batch.terminated[row],
        truncated=batch.truncated[row],
        success_reported=batch.success_reported[row],
        executed_length=executed,
    )
    write_tensor(outcome.rewards, rewards)
    write_tensor(outcome.successes, successes)
    for name, column in batch.observation.items():
        write_tensor(outcome.observation[name], decode_tensor(column, max_bytes=MAX_BATCH_BYTES)[row])
    return outcome

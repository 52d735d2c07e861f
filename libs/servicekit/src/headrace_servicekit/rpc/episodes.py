"""Episodes of robots between numpy arrays and the wire; every shape is checked against the others.

Shapes: T chunks, C actions of a chunk, A numbers of an action. Knows no policy and no environment.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType

import numpy as np
from headrace.common.v1 import common_pb2

from headrace_servicekit.rpc.errors import ServiceError, invalid
from headrace_servicekit.rpc.tensors import decode_tensor, encode_tensor, write_tensor
from headrace_servicekit.rpc.trajectories import segments_of

ACTIONS = "actions"
"""The entry of `sampled` that every policy has."""
STATE = "state"
IMAGE = "image/"
"""Names of observations: the state, and a camera's picture."""
MAX_EPISODE_BYTES = 1 << 34
INLINE_BYTES = 256 * 1024
"""Largest body of a tensor that travels in the message itself."""

Arrays = Mapping[str, np.ndarray]
Bodies = Mapping[str, bytes | bytearray]
"""What tensors refer to, by digest."""
NO_BODIES: Bodies = MappingProxyType({})


def is_image(dtype: np.dtype, shape: Sequence[int]) -> bool:
    """Whether an observation is a picture: uint8, (height, width, channels), of which channels are the fewest."""
    return dtype == np.uint8 and len(shape) == 3 and 0 < shape[2] <= min(shape[:2])


@dataclass(frozen=True)
class Episode:
    """What a policy of one version did; see ActionSegment.

    `observation` and `sampled` are (T, …) by name, `executed_TCA` numbers in the environment's units, `valid_TC` true
    at executed actions, `rewards_TC` and `successes_TC` theirs. `values_T` is None without a critic.
    `final_observation` is what came behind the last action of an episode that was cut; else empty. `intervened_TC` is
    true where `author` did the executed action, in place of the policy's; None where nobody did.
    """

    observation: Arrays
    sampled: Arrays
    executed_TCA: np.ndarray
    valid_TC: np.ndarray
    log_probs_TCA: np.ndarray
    rewards_TC: np.ndarray
    successes_TC: np.ndarray
    terminated: bool
    truncated: bool
    values_T: np.ndarray | None = None
    final_observation: Arrays = field(default_factory=dict)
    intervened_TC: np.ndarray | None = None
    author: str = ""

    @property
    def steps(self) -> int:
        """Executed actions."""
        return int(self.valid_TC.sum())

    @property
    def total_reward(self) -> float:
        """The sum of rewards."""
        return float(self.rewards_TC.sum(dtype=np.float64))

    @property
    def success(self) -> bool:
        """Whether any action succeeded."""
        return bool(self.successes_TC.any())


def encode_episode(
    episode: Episode, hold: Callable[[memoryview], common_pb2.BlobRef] | None = None
) -> common_pb2.ActionSegment:
    """The episode as a segment's body. What was seen goes by reference where it is large and `hold` keeps it."""
    message = common_pb2.ActionSegment(
        executed_action=encode_tensor(episode.executed_TCA),
        valid_mask=encode_tensor(episode.valid_TC),
        log_probs=encode_tensor(episode.log_probs_TCA),
        rewards=encode_tensor(episode.rewards_TC),
        successes=encode_tensor(episode.successes_TC),
        terminated=episode.terminated,
        truncated=episode.truncated,
        author=episode.author,
    )
    for arrays, target in (
        (episode.observation, message.observation),
        (episode.sampled, message.sampled),
        (episode.final_observation, message.final_observation),
    ):
        for name, array in arrays.items():
            if hold is None or array.nbytes <= INLINE_BYTES:
                write_tensor(target[name], array)
            else:
                write_tensor(target[name], array, hold)
    if episode.values_T is not None:
        message.values.CopyFrom(encode_tensor(episode.values_T))
    if episode.intervened_TC is not None:
        message.intervened.CopyFrom(encode_tensor(episode.intervened_TC))
    return message


def bodies_of(trajectory: common_pb2.Trajectory) -> list[common_pb2.BlobRef]:
    """What a trajectory's episodes refer to: bodies that stay with its producer."""
    return [
        tensor.blob
        for segment in segments_of(trajectory)
        if segment.HasField("actions")
        for tensor in references(segment.actions)
    ]


def references(message: common_pb2.ActionSegment) -> list[common_pb2.Tensor]:
    """The tensors of a segment whose bodies are elsewhere."""
    tensors = (*message.observation.values(), *message.sampled.values(), *message.final_observation.values())
    return [tensor for tensor in tensors if tensor.WhichOneof("body") == "blob"]


def decode_episode(
    message: common_pb2.ActionSegment, *, max_bytes: int = MAX_EPISODE_BYTES, bodies: Bodies = NO_BODIES
) -> Episode:
    """The episode of a segment, with the `bodies` that it refers to.

    Raises ServiceError INVALID, which names the field that does not fit.
    """
    valid_TC = _decoded("valid_mask", message.valid_mask, max_bytes, np.dtype(np.bool_), 2)
    chunks, length = valid_TC.shape
    if not chunks or not valid_TC[:, 0].all():
        raise invalid("valid_mask: every chunk has an executed action, and an episode has a chunk")
    if (np.diff(valid_TC.astype(np.int8), axis=1) > 0).any():
        raise invalid("valid_mask: the executed actions of a chunk come first")
    found = Episode(
        observation=_named("observation", message.observation, max_bytes, chunks, bodies),
        sampled=_named("sampled", message.sampled, max_bytes, chunks, bodies),
        executed_TCA=_decoded("executed_action", message.executed_action, max_bytes, None, 3),
        valid_TC=valid_TC,
        log_probs_TCA=_decoded("log_probs", message.log_probs, max_bytes, np.dtype(np.float32), 3),
        rewards_TC=_decoded("rewards", message.rewards, max_bytes, np.dtype(np.float32), 2),
        successes_TC=_decoded("successes", message.successes, max_bytes, np.dtype(np.bool_), 2),
        terminated=message.terminated,
        truncated=message.truncated,
        values_T=_decoded("values", message.values, max_bytes, np.dtype(np.float32), 1)
        if message.HasField("values")
        else None,
        final_observation=_named("final_observation", message.final_observation, max_bytes, None, bodies),
        intervened_TC=_decoded("intervened", message.intervened, max_bytes, np.dtype(np.bool_), 2)
        if message.HasField("intervened")
        else None,
        author=message.author,
    )
    _check_shapes(found, chunks, length)
    return found


def _check_shapes(found: Episode, chunks: int, length: int) -> None:
    if found.sampled.get(ACTIONS) is None or found.sampled[ACTIONS].shape[:2] != (chunks, length):
        raise invalid(f"sampled: {ACTIONS!r} has one entry for each of {chunks} chunks of {length} actions")
    for name, shape in (
        ("executed_action", found.executed_TCA.shape[:2]),
        ("log_probs", found.log_probs_TCA.shape[:2]),
        ("rewards", found.rewards_TC.shape),
        ("successes", found.successes_TC.shape),
        ("intervened", (chunks, length) if found.intervened_TC is None else found.intervened_TC.shape),
    ):
        if shape != (chunks, length):
            raise invalid(f"{name}: shape {tuple(shape)} where valid_mask has {(chunks, length)}")
    if found.values_T is not None and found.values_T.shape != (chunks,):
        raise invalid(f"values: shape {found.values_T.shape} for {chunks} chunks")
    if found.terminated and found.truncated:
        raise invalid("terminated, truncated: an episode ends by itself or is cut, not both")
    if found.truncated and set(found.final_observation) != set(found.observation):
        raise invalid("final_observation: an episode that was cut has one, with the names of observation")
    for name, array in found.final_observation.items():
        if name in found.observation and array.shape != found.observation[name].shape[1:]:
            raise invalid(f"final_observation: {name!r} has another shape than in observation")


def _named(
    where: str, tensors: Mapping[str, common_pb2.Tensor], max_bytes: int, chunks: int | None, bodies: Bodies
) -> dict[str, np.ndarray]:
    arrays = {
        name: _array(f"{where}: {name!r}", tensor, max_bytes, bodies.get(tensor.blob.digest))
        for name, tensor in sorted(tensors.items())
    }
    for name, array in arrays.items():
        if chunks is not None and (array.ndim < 1 or len(array) != chunks):
            raise invalid(f"{where}: {name!r} has shape {array.shape} for {chunks} chunks")
    return arrays


def _decoded(
    where: str, tensor: common_pb2.Tensor, max_bytes: int, dtype: np.dtype | None, dimensions: int
) -> np.ndarray:
    array = _array(where, tensor, max_bytes)
    if array.ndim != dimensions or (dtype is not None and array.dtype != dtype):
        wanted = f"{dimensions} dimensions" + (f" of {dtype}" if dtype is not None else "")
        raise invalid(f"{where}: {array.dtype} of shape {array.shape}; it has {wanted}")
    return array


def _array(
    where: str, tensor: common_pb2.Tensor, max_bytes: int, body: bytes | bytearray | None = None
) -> np.ndarray:
    try:
        return decode_tensor(tensor, max_bytes=max_bytes, body=body)
    except ServiceError as error:
        raise invalid(f"{where}: {error.message}") from error

"""Settled episodes from messages to the trainer's own records. Checks that they fit the policy; decides nothing else.

Shapes: T chunks of an episode, C actions of a chunk, A numbers of an action, S numbers of a state.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
from headrace.common.v1 import common_pb2
from headrace.trainer.v1 import trainer_pb2
from headrace_servicekit.rpc.digests import set_digest
from headrace_servicekit.rpc.episodes import (
    ACTIONS,
    IMAGE,
    NO_BODIES,
    STATE,
    Arrays,
    Bodies,
    Episode,
    decode_episode,
)
from headrace_servicekit.rpc.errors import ServiceError
from headrace_servicekit.rpc.trajectories import segments_of
from headrace_trainer.errors import invalid
from headrace_trainer.learning.reading import check_settled
from headrace_trainer.learning.samples import EpisodeMember, Group

_SETTLED = {
    common_pb2.FINISH_REASON_TERMINATED: "terminated",
    common_pb2.FINISH_REASON_TRUNCATED: "truncated",
}


@dataclass(frozen=True)
class Spaces:
    """What a policy reads and draws. `state_size` is None where it reads a state of any size, 0 for none."""

    chunk_length: int
    action_size: int
    state_size: int | None
    cameras: tuple[str, ...] = ()
    channels: int = 3
    """Of each camera's image."""
    categories: tuple[int, ...] = ()
    """Of each number of an action; 0: it is none. Empty: none is."""

    @classmethod
    def of(cls, config: Any) -> Spaces:
        """Those of a policy's configuration, of whatever kind."""
        size = getattr(config, "state_size", None)
        if size is None and hasattr(config, "proprio"):  # OpenVLA reads a state where it has statistics of it
            size = config.proprio.size if config.proprio is not None else 0
        return cls(
            config.chunk_length,
            config.bounds.size,
            size,
            tuple(getattr(config, "cameras", ())),
            getattr(config, "channels", 3),
            tuple(getattr(config, "categories", ())),
        )


def read_episodes(message: trainer_pb2.SettledGroup, spaces: Spaces, bodies: Bodies = NO_BODIES) -> Group:
    """A settled group of episodes; `bodies` has what they refer to. Raises Refusal INVALID or DIGEST_MISMATCH."""
    if not message.members:
        raise invalid(f"prompt {message.prompt_ordinal}: a group without members")
    members = tuple(
        _read_member(message.prompt_ordinal, member, spaces, bodies)
        for member in sorted(message.members, key=lambda member: member.trajectory.sample.sample_index)
    )
    if len({member.sample_index for member in members}) != len(members):
        raise invalid(f"prompt {message.prompt_ordinal}: a sample is in the group twice")
    keys = [(message.prompt_ordinal, m.sample_index, m.attempt, m.body_digest) for m in members]
    return Group(message.prompt_ordinal, members, set_digest(keys))


def _read_member(
    prompt: int, message: trainer_pb2.SettledTrajectory, spaces: Spaces, bodies: Bodies
) -> EpisodeMember:
    trajectory = message.trajectory
    where = check_settled(prompt, trajectory, frozenset(_SETTLED), "finished episodes")
    tokens, segment = _segments(trajectory, where)
    try:
        episode = decode_episode(segment.actions, bodies=bodies)
    except ServiceError as error:
        raise invalid(f"{where}: {error.message}") from error
    wanted = _SETTLED[trajectory.finish_reason]
    if not getattr(episode, wanted):
        raise invalid(f"{where}: finish_reason says {wanted}, and its actions do not")
    _check_fit(episode, spaces, where)
    return EpisodeMember(
        sample_index=trajectory.sample.sample_index,
        attempt=trajectory.attempt,
        body_digest=trajectory.body_digest,
        reward=message.reward,
        instruction=tokens,
        policy_number=segment.policy_number,
        truncated=episode.truncated,
        masked=message.masked,
        episode=episode,
    )


def _segments(trajectory: common_pb2.Trajectory, where: str) -> tuple[list[int], common_pb2.Segment]:
    """The instruction's ids, and the segment of actions."""
    segments = [*segments_of(trajectory)]
    kinds = [segment.WhichOneof("body") for segment in segments]
    if kinds not in (["actions"], ["tokens", "actions"]):
        found = ", ".join(kind or "an empty one" for kind in kinds) or "none"
        raise invalid(
            f"{where}: segments are {found}; an episode has one of actions, and before it one of tokens where the "
            "policy reads an instruction"
        )
    acted = segments[-1]
    if acted.policy_number < 1:
        raise invalid(
            f"{where}: policy_number {acted.policy_number} of its actions; a version's number is 1 or more"
        )
    if len(kinds) == 1:
        return [], acted
    said = segments[0]
    if said.policy_number:
        raise invalid(
            f"{where}: policy_number {said.policy_number} of its instruction, which nobody sampled; give 0"
        )
    return list(said.tokens.token_ids), acted


def _check_fit(episode: Episode, spaces: Spaces, where: str) -> None:
    """Raises Refusal INVALID naming the field of the episode that is not as the policy reads or draws it."""
    wanted = (spaces.chunk_length, spaces.action_size)
    # An action of categories alone is whole numbers.
    kinds = "i" if spaces.categories and all(spaces.categories) else "f"
    if episode.executed_TCA.dtype.kind not in kinds or episode.executed_TCA.shape[2:] != wanted[1:]:
        raise invalid(
            f"{where}: executed_action: {episode.executed_TCA.dtype} of shape {episode.executed_TCA.shape}"
        )
    drawn = episode.sampled[ACTIONS].dtype
    if drawn not in (np.float32, np.int64):
        raise invalid(f"{where}: sampled: {ACTIONS!r} is {drawn}; give float32 numbers or int64 ids")
    found = {"sampled": episode.sampled[ACTIONS].shape[1:], "log_probs": episode.log_probs_TCA.shape[1:]}
    for name, shape in found.items():
        if tuple(shape) != wanted:
            raise invalid(f"{where}: {name}: chunks of shape {tuple(shape)}; the policy draws {wanted}")
    if spaces.categories:
        _check_categories(episode.sampled[ACTIONS], spaces.categories, where)
    _check_seen("observation", episode.observation, spaces, where, 1)
    if episode.truncated:
        _check_seen("final_observation", episode.final_observation, spaces, where, 0)


def _check_categories(drawn_TCA: np.ndarray, categories: tuple[int, ...], where: str) -> None:
    chosen = np.array(categories, bool)
    drawn, counts = drawn_TCA[..., chosen], np.array(categories)[chosen]
    # What is not a number is among none.
    wrong = ~((drawn >= 0) & (drawn < counts) & (drawn == np.floor(drawn)))
    if wrong.any():
        raise invalid(
            f"{where}: sampled: {ACTIONS!r} holds {drawn[wrong][0]:g}, which is none of the policy's categories"
        )


def _check_seen(field: str, seen: Arrays, spaces: Spaces, where: str, before: int) -> None:
    """`before` counts the dimensions before those of one observation."""
    images = [f"{IMAGE}{camera}" for camera in spaces.cameras]
    wanted = [*([STATE] if spaces.state_size != 0 else []), *images]
    if missing := [name for name in wanted if name not in seen]:
        raise invalid(
            f"{where}: {field}: there is no {missing[0]!r}, which the policy reads; only {sorted(seen)}"
        )
    if spaces.state_size != 0:
        _check_state(field, seen, spaces.state_size, where, before)
    for name in images:
        image = seen[name]
        if image.dtype != np.uint8 or image.ndim != before + 3 or image.shape[-1] != spaces.channels:
            raise invalid(
                f"{where}: {field}: {name!r} is {image.dtype} of shape {image.shape}; give (H, W, "
                f"{spaces.channels}) uint8"
            )


def _check_state(
    field: str, seen: Mapping[str, np.ndarray], size: int | None, where: str, before: int
) -> None:
    state = seen[STATE]
    fits = state.ndim == before + 1 and np.issubdtype(state.dtype, np.floating)
    if not fits or (size is not None and state.shape[-1] != size):
        raise invalid(
            f"{where}: {field}: {STATE!r} is {state.dtype} of shape {state.shape}; the policy reads "
            f"{'numbers' if size is None else f'{size} numbers'}"
        )

"""Batches of transitions from the stores' rows, and episodes from rounds to what a store takes. Knows no optimizer.

Shapes: B transitions of this rank, T chunks of an episode, C actions of a chunk, A numbers of an action.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from headrace_servicekit.rpc.episodes import ACTIONS, IMAGE, STATE
from headrace_trainer.learning.samples import EpisodeData
from torch import Tensor

from headrace_robots.policies.policy import Observation, RobotPolicy
from headrace_robots.trainer.off_policy.updates import Batch
from headrace_robots.trainer.replay.records import Spaces, Stored
from headrace_robots.trainer.replay.ring import Drawn
from headrace_robots.trainer.replay.store import ReplayStore


def batch_of(
    source: ReplayStore, drawn: Drawn, policy: RobotPolicy, device: torch.device, size: int, *, is_shown: bool
) -> Batch:
    """Transitions of a store as a part of a batch of so many; `is_shown`: they are demonstrations."""
    episodes = source.of_rows(drawn.rows_B)

    def tensor(values: np.ndarray) -> Tensor:
        return torch.from_numpy(values).to(device)

    def seen(rows_B: np.ndarray, states_BS: np.ndarray) -> Observation:
        images = {name: tensor(source.pictures(rows_B, name)) for name in source.spaces.cameras}
        return Observation(tensor(states_BS) if states_BS.shape[1] else None, images)

    return Batch(
        seen=seen(drawn.rows_B, drawn.states_BS),
        actions_BCA=tensor(drawn.actions_BA).view(-1, policy.chunk_length, policy.action_size),
        rewards_B=tensor(drawn.rewards_B),
        discounts_B=tensor(drawn.discounts_B),
        following=seen(drawn.next_rows_B, drawn.next_states_BS),
        weights_B=tensor(drawn.weights_B),
        successes_B=torch.tensor([bool(each.success) for each in episodes], device=device),
        returns_B=torch.tensor([each.total for each in episodes], device=device),
        shown_B=tensor(source.shown(drawn.rows_B)) | is_shown,
        to_go_B=tensor(drawn.returns_B),
        count=float(size),
    )


def stored_of(data: EpisodeData, policy: RobotPolicy, spaces: Spaces, scale: float) -> Stored:
    """An episode as a store takes it; `scale` is the factor of its rewards.

    A chunk in which a person acted has what was done, as the policy would have drawn it.
    """
    outcome = {name: array.array() for name, array in data.outcome.items()}
    terminated, success = (bool(each) for each in outcome["ended"])
    states, length = np.zeros((len(outcome["rewards"]), 0), np.float32), len(outcome["rewards"])
    if STATE in data.observation:
        states = data.observation[STATE].array()
    size = spaces.state_size
    states, actions = states[:, :size].astype(np.float32), data.sampled[ACTIONS].array()
    shown_T = np.zeros(length, np.bool_)
    if "intervened" in outcome:
        shown_T |= outcome["intervened"].any(1)
        done_TCA = policy.head.drawn_of(torch.from_numpy(outcome["executed"][shown_T]))  # type: ignore[operator, union-attr]
        actions = actions.astype(np.float32)
        actions[shown_T] = done_TCA.float().numpy()

    def whole(name: str, own: np.ndarray) -> np.ndarray:
        last = data.final[name].array() if name in data.final else np.zeros(own.shape[1:], own.dtype)
        return np.concatenate([own, last[None].astype(own.dtype)])

    images = {
        name.removeprefix(IMAGE): whole(name, array.array())
        for name, array in data.observation.items()
        if name.startswith(IMAGE)
    }
    return Stored(
        data.key,
        int(outcome["version"][0]),
        whole(STATE, states) if size else np.zeros((length + 1, 0), np.float32),
        actions.reshape(length, -1).astype(np.float32),
        outcome["rewards"] * scale,
        terminated,
        success,
        images,
        shown_T,
        outcome["author"].tobytes().decode() if "author" in outcome else "",
    )


def joined(parts: Many[Batch]) -> Batch:
    """Batches, one after the other."""
    first = parts[0]

    def seen(name: str) -> Observation:
        each: list[Observation] = [getattr(part, name) for part in parts]
        states = [one.state_BS for one in each if one.state_BS is not None]
        images = {camera: torch.cat([one.images[camera] for one in each]) for camera in each[0].images}
        return Observation(torch.cat(states) if states else None, images)

    tensors: dict[str, Any] = {
        name: torch.cat([getattr(part, name) for part in parts])
        for name, value in vars(first).items()
        if isinstance(value, Tensor)
    }
    return replace(first, seen=seen("seen"), following=seen("following"), **tensors)

"""The chunks of a store's episodes as rows in memory, and transitions of several steps gathered from them.

A ring: row number r lies at r modulo the capacity, so that a store that is opened again draws the same. An episode of
T chunks takes T + 1 rows, the last one of what it ended with. Knows no files, no pictures and no policy.
Shapes: N rows, B drawn transitions, S numbers of a state, A numbers of a chunk's actions.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Drawn:
    """B transitions. `rewards_B` are discounted sums over the steps that they span, `discounts_B` what the next state's
    value is multiplied by: 0 behind an end; `returns_B` are discounted sums to the episode's end. `rows_B` and
    `next_rows_B` are row numbers.
    """

    rows_B: np.ndarray
    next_rows_B: np.ndarray
    states_BS: np.ndarray
    actions_BA: np.ndarray
    rewards_B: np.ndarray
    discounts_B: np.ndarray
    next_states_BS: np.ndarray
    weights_B: np.ndarray
    returns_B: np.ndarray


class Ring:
    """Rows of at most `capacity` numbers; what is appended overwrites what was dropped."""

    def __init__(self, capacity: int, state_size: int, action_size: int) -> None:
        self.capacity = capacity
        self.first = self.end = 0
        """Numbers of the oldest row, and of the next one."""
        self.states_NS = np.zeros((capacity, state_size), np.float32)
        self.actions_NA = np.zeros((capacity, action_size), np.float32)
        self.rewards_N = np.zeros(capacity, np.float32)
        self.returns_N = np.zeros(capacity, np.float32)
        """Discounted sums of the rewards until the episode's end."""
        self.left_N = np.zeros(capacity, np.int32)
        """Chunks until the episode's end; 0 at what it ended with."""
        self.terminated_N = np.zeros(capacity, np.bool_)
        self.shown_N = np.zeros(capacity, np.bool_)
        """Where a person acted."""
        self.episodes_N = np.zeros(capacity, np.int64)
        self.priorities_N = np.zeros(capacity, np.float32)

    def __len__(self) -> int:
        """Rows that there are."""
        return self.end - self.first

    @property
    def bytes(self) -> int:
        """What the rows take in memory."""
        arrays = (
            *(self.states_NS, self.actions_NA, self.rewards_N, self.returns_N),
            *(self.left_N, self.shown_N),
        )
        return sum(each.nbytes for each in (*arrays, self.terminated_N, self.episodes_N, self.priorities_N))

    def append(
        self,
        episode: int,
        states: np.ndarray,
        actions: np.ndarray,
        rewards: np.ndarray,
        *,
        terminated: bool,
        priorities: np.ndarray,
        gamma: float,
        shown_T: np.ndarray | None = None,
    ) -> np.ndarray:
        """Appends an episode, for which there must be room; the places of its rows."""
        length = len(rewards)
        at = self.places(np.arange(self.end, self.end + length + 1))
        self.states_NS[at] = states
        self.actions_NA[at[:-1]], self.actions_NA[at[-1]] = actions, 0
        self.rewards_N[at[:-1]], self.rewards_N[at[-1]] = rewards, 0
        returns = [0.0]
        for reward in rewards[::-1].tolist():
            returns.append(reward + gamma * returns[-1])
        self.returns_N[at] = returns[::-1]
        self.left_N[at] = np.arange(length, -1, -1)
        self.terminated_N[at], self.episodes_N[at] = terminated, episode
        self.shown_N[at] = False
        if shown_T is not None:
            self.shown_N[at[:-1]] = shown_T
        self.priorities_N[at[:-1]], self.priorities_N[at[-1]] = priorities, 0
        self.end += length + 1
        return at

    def places(self, rows: np.ndarray) -> np.ndarray:
        """Where rows of these numbers lie."""
        found: np.ndarray = rows % self.capacity
        return found

    def gather(self, rows_B: np.ndarray, weights_B: np.ndarray, *, gamma: float, steps: int) -> Drawn:
        """The transitions that begin at these rows and span up to `steps` chunks, no further than their episode."""
        at_B = self.places(rows_B)
        span_B = np.minimum(steps, self.left_N[at_B])
        rewards_B = self.rewards_N[at_B].astype(np.float64)
        for step in range(1, steps):
            there = self.rewards_N[self.places(rows_B + step)]
            rewards_B += np.where(step < span_B, gamma**step * there, 0.0)
        next_rows_B = rows_B + span_B
        next_B = self.places(next_rows_B)
        ended_B = (self.left_N[next_B] == 0) & self.terminated_N[at_B]
        return Drawn(
            rows_B,
            next_rows_B,
            self.states_NS[at_B],
            self.actions_NA[at_B],
            rewards_B.astype(np.float32),
            np.where(ended_B, 0.0, gamma**span_B).astype(np.float32),
            self.states_NS[next_B],
            weights_B.astype(np.float32),
            self.returns_N[at_B],
        )

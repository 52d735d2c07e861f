"""What a replay store's file holds: its tables, and the records that go in and come out. Knows no rows in memory.

Shapes: T chunks of an episode, S numbers of a state, A numbers of a chunk's actions, H × W pixels.
"""

from __future__ import annotations

import json
import sqlite3
from collections.abc import Iterable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np

from headrace_robots.trainer.replay.draws import Draws

FORMAT = 2
TABLES = """
CREATE TABLE IF NOT EXISTS meta (name TEXT PRIMARY KEY, value TEXT NOT NULL);
CREATE TABLE IF NOT EXISTS commits (number INTEGER PRIMARY KEY, largest REAL NOT NULL);
CREATE TABLE IF NOT EXISTS episodes (
  id INTEGER PRIMARY KEY, prompt INTEGER NOT NULL, sample INTEGER NOT NULL, version INTEGER NOT NULL,
  added INTEGER NOT NULL, evicted INTEGER, first INTEGER NOT NULL, chunks INTEGER NOT NULL,
  terminated INTEGER NOT NULL, success INTEGER NOT NULL, total REAL NOT NULL, shown BLOB NOT NULL,
  author TEXT NOT NULL, used INTEGER NOT NULL DEFAULT 0,
  body BLOB NOT NULL);
CREATE TABLE IF NOT EXISTS uses (
  added INTEGER NOT NULL, episode INTEGER NOT NULL, count INTEGER NOT NULL, PRIMARY KEY (episode, added));
CREATE TABLE IF NOT EXISTS priorities (
  episode INTEGER NOT NULL, added INTEGER NOT NULL, body BLOB NOT NULL, PRIMARY KEY (episode, added));
CREATE TABLE IF NOT EXISTS pictures (
  episode INTEGER NOT NULL, place INTEGER NOT NULL, camera TEXT NOT NULL, body BLOB NOT NULL,
  PRIMARY KEY (episode, place, camera)) WITHOUT ROWID;
"""
COLUMNS = (
    "id, prompt, sample, version, added, evicted, first, chunks, terminated, success, total, shown, author"
)


class StoreProblem(Exception):
    """A store that cannot be used; the message says what to change."""


@dataclass(frozen=True)
class Spaces:
    """What the rows of a store are: numbers of a state and of a chunk's actions, and (H, W, channels) by camera."""

    state_size: int
    action_size: int
    cameras: Mapping[str, tuple[int, ...]] = field(default_factory=dict)

    def text(self) -> str:
        """As it stands in the file, and in messages."""
        cameras = {name: list(shape) for name, shape in sorted(self.cameras.items())}
        return json.dumps({"state": self.state_size, "action": self.action_size, "cameras": cameras})


@dataclass(frozen=True)
class Sampling:
    """How transitions are drawn: see the options of the same names."""

    gamma: float = 0.99
    n_step: int = 1
    draws: Draws = "uniform"
    priority_exponent: float = 0.6
    importance_exponent: float = 0.4
    recency: float = 2.0


@dataclass(frozen=True)
class Stored:
    """An episode as it is inserted. `states_TS`, (T + 1, S), and each of `pictures`, (T + 1, H, W, channels) uint8,
    show what it ended with last, zeros where it terminated. `shown_T` is true at chunks in which a person, `author`,
    acted; None: in none.
    """

    slot: tuple[int, int]
    version: int
    states_TS: np.ndarray
    actions_TA: np.ndarray
    rewards_T: np.ndarray
    terminated: bool
    success: bool
    pictures: Mapping[str, np.ndarray] = field(default_factory=dict)
    shown_T: np.ndarray | None = None
    author: str = ""


class Kept(NamedTuple):
    """What is known of an episode beside its rows."""

    id: int
    prompt: int
    sample: int
    version: int
    added: int
    evicted: int | None
    first: int
    chunks: int
    terminated: int
    success: int
    total: float
    shown: bytes
    """A byte for each chunk, 1 where a person acted; empty where nobody did."""
    author: str


class Use(NamedTuple):
    """How often an episode was drawn: `slot` is its (prompt ordinal, sample index) in the run's ledger."""

    slot: tuple[int, int]
    version: int
    commit: int
    chunks: int
    uses: int
    evicted: bool


def read_uses(path: Path) -> list[Use]:
    """How often each episode of a store's file was drawn, while a trainer uses it or not. Raises StoreProblem."""
    try:
        with closing(sqlite3.connect(f"{path.absolute().as_uri()}?mode=ro", uri=True)) as file:
            return [*uses_of(file)]
    except sqlite3.Error as error:
        raise StoreProblem(f"{path} is no replay store that can be read: {error}") from error


def uses_of(file: sqlite3.Connection) -> Iterator[Use]:
    """Of an open file."""
    rows: Iterable[tuple[Any, ...]] = file.execute(
        "SELECT prompt, sample, version, added, chunks, used + COALESCE((SELECT SUM(count) FROM uses WHERE "
        "uses.episode = episodes.id), 0), evicted IS NOT NULL FROM episodes ORDER BY id"
    )
    for prompt, sample, version, added, chunks, count, evicted in rows:
        yield Use((prompt, sample), version, added, chunks, count, bool(evicted))

"""The episodes of one trainer rank: in an SQLite file, and their chunks as rows in memory.

Every change belongs to a numbered commit. What is not committed is lost with the process, and a restored trainer goes
back to the commit of its checkpoint: so the store is what it was, however the process ended. Knows no policy.
Shapes: T chunks of an episode, S numbers of a state, A numbers of a chunk's actions, H × W pixels.
"""

from __future__ import annotations

import sqlite3
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace_robots.trainer.replay.draws import LEAST, Drawer
from headrace_robots.trainer.replay.records import (
    COLUMNS,
    FORMAT,
    TABLES,
    Kept,
    Sampling,
    Spaces,
    Stored,
    StoreProblem,
    Use,
    uses_of,
)
from headrace_robots.trainer.replay.ring import Drawn, Ring


class ReplayStore:
    """At most `capacity` rows, of which an episode of T chunks takes T + 1; beyond it the oldest episodes go."""

    def __init__(self, path: Path | None, capacity: int, spaces: Spaces, sampling: Sampling) -> None:
        """Opens or makes the file; None: in memory. Raises StoreProblem, also for a file of other spaces."""
        self.spaces, self.sampling, self.path = spaces, sampling, path
        self.commit_number = 0
        self.episodes: dict[int, Kept] = {}
        """Those that are drawn from, by id, the oldest first."""
        self._capacity = capacity
        self._largest = 1.0
        self._uses: Counter[int] = Counter()
        self._touched: set[int] = set()
        if path is not None:
            path.parent.mkdir(parents=True, exist_ok=True)
        with self._told():
            self._file = sqlite3.connect(path or ":memory:", isolation_level=None, check_same_thread=False)
            self._file.execute("PRAGMA journal_mode=WAL")
            self._file.execute("PRAGMA synchronous=NORMAL")
            self._file.executescript(TABLES)
            self._check_spaces()
            self._load()

    def __len__(self) -> int:
        """Chunks that can be drawn."""
        return len(self.ring) - len(self.episodes)

    def close(self) -> None:
        """Drops what is not committed."""
        self._file.close()

    # Changes, which `commit` keeps

    def insert(self, stored: Stored) -> int:
        """Adds an episode, for which the oldest may go; its id. Raises StoreProblem, and then nothing is added."""
        chunks = len(stored.rewards_T)
        self._check_fit(stored)
        with self._told():
            self._begin()
            while self.episodes and len(self.ring) + chunks + 1 > self.ring.capacity:
                self._evict(next(iter(self.episodes)))
            body = b"".join(
                np.ascontiguousarray(each, np.float32).tobytes()
                for each in (stored.states_TS, stored.actions_TA, stored.rewards_T)
            )
            values: tuple[Any, ...] = (
                *stored.slot,
                stored.version,
                self.commit_number + 1,
                None,
                self.ring.end,
                chunks,
                int(stored.terminated),
                int(stored.success),
                float(stored.rewards_T.sum(dtype=np.float64)),
                b"" if stored.shown_T is None or not stored.shown_T.any() else stored.shown_T.tobytes(),
                stored.author,
            )
            names = COLUMNS.removeprefix("id, ")
            found = self._file.execute(
                f"INSERT INTO episodes ({names}, body) VALUES (?,?,?,?,?,?,?,?,?,?,?,?,?)", (*values, body)
            )
            number = int(found.lastrowid or 0)
            self._file.executemany("INSERT INTO pictures VALUES (?,?,?,?)", _encoded(number, stored.pictures))
        self._append(Kept(number, *values), body, np.full(chunks, self._largest, np.float32))
        if self.sampling.draws == "prioritised":
            self._touched.add(number)
        return number

    def draw(self, count: int, generator: np.random.Generator) -> Drawn:
        """Transitions, each of which counts as a use of its episode. Raises StoreProblem where there is none."""
        if not len(self):
            raise StoreProblem("there is no episode in the store to draw from")
        drawn = self.ring.gather(
            *self._drawer.draw(count, generator), gamma=self.sampling.gamma, steps=self.sampling.n_step
        )
        self._uses.update(self.ring.episodes_N[self.ring.places(drawn.rows_B)].tolist())
        return drawn

    def prioritise(self, rows_B: np.ndarray, differences_B: np.ndarray) -> None:
        """Gives rows the priority of their temporal differences. Does nothing where draws are not prioritised."""
        if self.sampling.draws != "prioritised":
            return
        at = self.ring.places(rows_B)
        self.ring.priorities_N[at] = np.abs(differences_B) + LEAST
        self._largest = max(self._largest, float(self.ring.priorities_N[at].max()))
        self._drawer.changed(np.unique(at))
        self._touched.update(self.ring.episodes_N[at].tolist())

    def commit(self) -> None:
        """Keeps what was changed, as the next commit. Raises StoreProblem."""
        number = self.commit_number + 1
        with self._told():
            self._begin()
            self._file.executemany(
                "INSERT INTO uses VALUES (?,?,?)", [(number, *each) for each in self._uses.items()]
            )
            self._file.executemany(
                "INSERT INTO priorities VALUES (?,?,?)",
                [
                    (each, number, self._own_priorities(each))
                    for each in sorted(self._touched & {*self.episodes})
                ],
            )
            self._file.execute("INSERT INTO commits VALUES (?,?)", (number, self._largest))
            self._file.execute("COMMIT")
        self.commit_number = number
        self._uses.clear()
        self._touched.clear()

    def rollback(self) -> None:
        """Undoes what was changed since the last commit."""
        if self._file.in_transaction:
            self._file.execute("ROLLBACK")
        self._load()

    def rewind(self, number: int) -> int:
        """Goes back to a commit: what came after it is gone. The commits that are missing before it, 0 where none is.

        Raises StoreProblem.
        """
        self.rollback()
        with self._told():
            self._file.execute("BEGIN IMMEDIATE")
            for table in ("uses", "priorities"):
                self._file.execute(f"DELETE FROM {table} WHERE added > ?", (number,))
            gone = "SELECT id FROM episodes WHERE added > ?"
            self._file.execute(f"DELETE FROM pictures WHERE episode IN ({gone})", (number,))
            self._file.execute("DELETE FROM episodes WHERE added > ?", (number,))
            self._file.execute("UPDATE episodes SET evicted = NULL WHERE evicted > ?", (number,))
            self._file.execute("DELETE FROM commits WHERE number > ?", (number,))
            self._file.execute("COMMIT")
            self._load()
        missing = number - self.commit_number
        self.commit_number = number
        return missing

    def forget(self, number: int) -> None:
        """Removes what only going back behind a commit would need: bodies of episodes that were evicted by then, and
        older priorities. Their uses stay. Raises StoreProblem.
        """
        with self._told():
            self._file.execute("BEGIN IMMEDIATE")
            gone = "SELECT id FROM episodes WHERE evicted <= ? AND body != x''"
            self._file.execute(f"DELETE FROM pictures WHERE episode IN ({gone})", (number,))
            self._file.execute("UPDATE episodes SET body = x'' WHERE evicted <= ? AND body != x''", (number,))
            newest = "SELECT MAX(added) FROM priorities AS own WHERE own.episode = priorities.episode AND added <= ?"
            self._file.execute(f"DELETE FROM priorities WHERE added < ({newest})", (number,))
            self._file.execute(
                "UPDATE episodes SET used = used + COALESCE((SELECT SUM(count) FROM uses WHERE episode = id AND "
                "uses.added <= ?1), 0) WHERE id IN (SELECT episode FROM uses WHERE uses.added <= ?1)",
                (number,),
            )
            self._file.execute("DELETE FROM uses WHERE added <= ?", (number,))
            self._file.execute("COMMIT")

    # What there is

    def pictures(self, rows_B: np.ndarray, camera: str) -> np.ndarray:
        """(B, H, W, channels) of a camera at these rows."""
        shape = self.spaces.cameras[camera]
        episodes = self.ring.episodes_N[self.ring.places(rows_B)].tolist()
        found = np.zeros((len(rows_B), *shape), np.uint8)
        for place, (episode, row) in enumerate(zip(episodes, rows_B.tolist(), strict=True)):
            key = episode, row - self.episodes[episode].first, camera
            body = self._file.execute(
                "SELECT body FROM pictures WHERE episode = ? AND place = ? AND camera = ?", key
            ).fetchone()
            if body is not None:  # what a terminated episode ended with is not seen
                found[place] = np.frombuffer(zlib.decompress(body[0]), np.uint8).reshape(shape)
        return found

    def of_rows(self, rows_B: np.ndarray) -> list[Kept]:
        """The episode of each row."""
        return [self.episodes[each] for each in self.ring.episodes_N[self.ring.places(rows_B)].tolist()]

    def shown(self, rows_B: np.ndarray) -> np.ndarray:
        """Whether a person acted at each row."""
        found: np.ndarray = self.ring.shown_N[self.ring.places(rows_B)]
        return found

    def uses(self) -> list[Use]:
        """How often each committed episode was drawn, in the order of their insertion."""
        return [*uses_of(self._file)]

    def drawn(self) -> tuple[float, float]:
        """How many transitions were drawn since the last commit, and for how many commits these were in the store."""
        now = self.commit_number + 1
        ages = (
            count * (now - self.episodes[each].added)
            for each, count in self._uses.items()
            if each in self.episodes
        )
        return float(self._uses.total()), float(sum(ages))

    def stored(self, number: int) -> Iterator[Stored]:
        """The episodes that are drawn from and were there at a commit, the oldest first."""
        for kept in [each for each in self.episodes.values() if each.added <= number]:
            (body,) = self._file.execute("SELECT body FROM episodes WHERE id = ?", (kept.id,)).fetchone()
            rows = np.arange(kept.first, kept.first + kept.chunks + 1)
            yield Stored(
                (kept.prompt, kept.sample),
                kept.version,
                *self._split(body, kept.chunks),
                bool(kept.terminated),
                bool(kept.success),
                {camera: self.pictures(rows, camera) for camera in self.spaces.cameras},
                np.frombuffer(kept.shown, np.bool_) if kept.shown else None,
                kept.author,
            )

    # Parts

    def _check_spaces(self) -> None:
        own = {"format": str(FORMAT), "spaces": self.spaces.text()}
        for name, value in own.items():
            self._file.execute("INSERT OR IGNORE INTO meta VALUES (?,?)", (name, value))
            (found,) = self._file.execute("SELECT value FROM meta WHERE name = ?", (name,)).fetchone()
            if found != value:
                raise StoreProblem(
                    f"{self.path} holds episodes of {name} {found}, and the policy has {value}; give the policy and "
                    "the environment that it was made with, or begin a run of its own"
                )

    def _check_fit(self, stored: Stored) -> None:
        chunks = len(stored.rewards_T)
        if chunks + 1 > self._capacity:
            raise StoreProblem(
                f"an episode of {chunks} chunks takes {chunks + 1} rows, and a rank's part of the store has "
                f"{self._capacity}; raise algorithm.options.capacity, or lower environment.max_episode_steps"
            )
        wanted = {
            "states": (stored.states_TS, (chunks + 1, self.spaces.state_size)),
            "actions": (stored.actions_TA, (chunks, self.spaces.action_size)),
            **{
                f"pictures of {camera!r}": (stored.pictures.get(camera, np.zeros(0)), (chunks + 1, *shape))
                for camera, shape in self.spaces.cameras.items()
            },
        }
        for name, (array, shape) in wanted.items():
            if array.shape != shape:
                raise StoreProblem(f"{name} of shape {array.shape} do not fit a store of {shape}")
            if array.dtype != np.uint8 and not np.isfinite(array).all():
                raise StoreProblem(
                    f"{name} are not all finite; mend the environment or leave the episode out"
                )
        if not np.isfinite(stored.rewards_T).all():
            raise StoreProblem("rewards are not all finite; mend the environment or leave the episode out")

    def _begin(self) -> None:
        if not self._file.in_transaction:
            self._file.execute("BEGIN IMMEDIATE")

    def _evict(self, number: int) -> None:
        kept = self.episodes.pop(number)
        self._file.execute("UPDATE episodes SET evicted = ? WHERE id = ?", (self.commit_number + 1, number))
        rows = np.arange(kept.first, kept.first + kept.chunks + 1)
        self._drawer.dropped(self.ring.places(rows))
        self.ring.first = kept.first + kept.chunks + 1

    def _append(self, kept: Kept, body: bytes, priorities: np.ndarray) -> None:
        if not self.episodes:
            self.ring.first = self.ring.end = kept.first
        self.episodes[kept.id] = kept
        at = self.ring.append(
            kept.id,
            *self._split(body, kept.chunks),
            terminated=bool(kept.terminated),
            priorities=priorities,
            gamma=self.sampling.gamma,
            shown_T=np.frombuffer(kept.shown, np.bool_) if kept.shown else None,
        )
        self._drawer.changed(at)

    def _split(self, body: bytes, chunks: int) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """States, actions and rewards."""
        state, action = self.spaces.state_size, self.spaces.action_size
        numbers = np.frombuffer(body, np.float32)
        first, second = (chunks + 1) * state, (chunks + 1) * state + chunks * action
        return (
            numbers[:first].reshape(chunks + 1, state),
            numbers[first:second].reshape(chunks, action),
            numbers[second:],
        )

    def _own_priorities(self, number: int) -> bytes:
        kept = self.episodes[number]
        rows = np.arange(kept.first, kept.first + kept.chunks)
        found: bytes = self.ring.priorities_N[self.ring.places(rows)].tobytes()
        return found

    def _load(self) -> None:
        """Reads the rows of the last commit."""
        sampling, self.episodes = self.sampling, {}
        self.ring = Ring(self._capacity, self.spaces.state_size, self.spaces.action_size)
        self._drawer = Drawer(
            self.ring,
            sampling.draws,
            exponent=sampling.priority_exponent,
            correction=sampling.importance_exponent,
            recency=sampling.recency,
        )
        self._uses.clear()
        self._touched.clear()
        last = self._file.execute("SELECT number, largest FROM commits ORDER BY number DESC").fetchone()
        self.commit_number, self._largest = last or (0, 1.0)
        known = dict[int, bytes]()
        if sampling.draws == "prioritised":
            known = dict(self._file.execute("SELECT episode, body FROM priorities ORDER BY episode, added"))
        rows = self._file.execute(
            f"SELECT {COLUMNS}, body FROM episodes WHERE evicted IS NULL AND body != x'' ORDER BY id"
        ).fetchall()
        sizes = np.cumsum([each[7] + 1 for each in reversed(rows)])
        fit = int(
            np.searchsorted(sizes, self._capacity, side="right")
        )  # fewer where the capacity was lowered
        for *values, body in rows[len(rows) - fit :]:
            kept = Kept(*values)
            wanted = self.spaces.state_size * (kept.chunks + 1) + (self.spaces.action_size + 1) * kept.chunks
            if len(body) != 4 * wanted:
                raise self._cut(f"episode {kept.id} has {len(body)} bytes, not {4 * wanted}")
            if self.episodes and kept.first != self.ring.end:
                raise self._cut(f"episode {kept.id} begins at row {kept.first}, not {self.ring.end}")
            own = known.get(kept.id)
            found = np.full(kept.chunks, 1.0, np.float32) if own is None else np.frombuffer(own, np.float32)
            self._append(kept, body, found)

    def _cut(self, what: str) -> StoreProblem:
        return StoreProblem(
            f"{self.path} is damaged ({what}): delete it, and the run goes on with an empty store; or restore it from "
            "a copy"
        )

    @contextmanager
    def _told(self) -> Iterator[None]:
        try:
            yield
        except sqlite3.DatabaseError as error:
            if "full" in str(error) or "disk I/O" in str(error):
                raise StoreProblem(
                    f"{self.path}: {error}: free the disk, or lower algorithm.options.capacity"
                ) from error
            raise self._cut(str(error)) from error


def _encoded(number: int, pictures: Mapping[str, np.ndarray]) -> Iterator[tuple[int, int, str, bytes]]:
    """Pictures stay compressed in the file until they are drawn."""
    for camera, frames in pictures.items():
        for place, frame in enumerate(frames):
            yield number, place, camera, zlib.compress(frame.tobytes(), 1)

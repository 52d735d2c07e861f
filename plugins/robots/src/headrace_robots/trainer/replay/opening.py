"""A rank's part of a run's replay store: where its file lies, what it holds, and what another number of ranks has left.

Knows no optimizer and no transport.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

from headrace_robots.policies.policy import RobotPolicy
from headrace_robots.trainer.replay.records import Sampling, Spaces, StoreProblem
from headrace_robots.trainer.replay.store import ReplayStore

_OPENED: WeakValueDictionary[Path, ReplayStore] = WeakValueDictionary()
"""Of this process, by file. A group that lost a rank in a step leaves one open whose transaction keeps others out."""


def spaces_of(policy: RobotPolicy) -> Spaces:
    """What rows are for a policy."""
    config = policy.config
    names = getattr(config, "cameras", ())
    shape = (config.height, config.width, config.channels) if names else ()
    cameras = dict.fromkeys(names, shape)
    return Spaces(config.state_numbers, policy.chunk_length * policy.action_size, cameras)


def sampling_of(options: Any) -> Sampling:
    """How an algorithm's options say that transitions are drawn."""
    names = ("draws", "priority_exponent", "importance_exponent", "recency")
    own = {name: getattr(options, name) for name in names}
    more = {name: getattr(options, name) for name in ("gamma", "n_step") if hasattr(options, name)}
    return Sampling(**own, **more)


def open_store(
    directory: Path | None, options: Any, policy: RobotPolicy, commits: int, rank: int, ranks: int
) -> tuple[ReplayStore, str]:
    """A rank's part as it was at a commit, and what is to be said of episodes that are missing, if any.

    Episodes that another number of ranks has stored are dealt out anew. Without a directory it is in memory. Raises
    StoreProblem.
    """
    capacity, spaces, sampling = -(-options.capacity // ranks), spaces_of(policy), sampling_of(options)
    path = None if directory is None else directory / f"{rank:03}-of-{ranks:03}.sqlite"
    others = sorted(directory.glob("*.sqlite")) if directory is not None and directory.is_dir() else []
    others = [other for other in others if not other.name.endswith(f"-of-{ranks:03}.sqlite")]
    for file in (*others, *([] if path is None else [path])):
        if (left := _OPENED.pop(file, None)) is not None:
            left.close()
    if others and path is not None:
        for old in directory.glob(f"{path.name}*") if directory is not None else ():
            old.unlink()  # of a branch that was left when the number of ranks changed
    store = ReplayStore(path, capacity, spaces, sampling)
    if path is not None:
        _OPENED[path] = store
    missing = store.rewind(commits)
    for place, other in enumerate(others if commits else []):
        missing = 0
        source = ReplayStore(other, options.capacity, spaces, sampling)
        try:
            _deal(source, store, commits, (rank - place) % ranks, ranks)
        finally:
            source.close()
    if others and commits:
        store.commit_number -= 1
        store.commit()
    if not missing:
        return store, ""
    return store, (
        f"algorithm.options.capacity: the replay store lacks the last {missing} of the checkpoint's {commits} commits, "
        f"and goes on with {len(store.episodes)} episodes on rank {rank}: its files in {directory} were lost, are "
        "another run's, or are on another host"
    )


def _deal(source: ReplayStore, store: ReplayStore, commits: int, rank: int, ranks: int) -> None:
    """Takes every `ranks`-th episode that was there at a commit, from the `rank`-th on."""
    if source.commit_number < commits:
        raise StoreProblem(
            f"{source.path} ends at commit {source.commit_number}, and the checkpoint is of {commits}; restore it from "
            "a copy, or delete the directory to go on with an empty store"
        )
    store.commit_number = commits - 1
    for place, stored in enumerate(source.stored(commits)):
        if place % ranks == rank:
            store.insert(stored)

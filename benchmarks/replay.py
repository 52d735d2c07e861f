"""The replay store: `python benchmarks/replay.py [--torchrl] [--episodes N]`.

Inserts episodes of 200 chunks (17 numbers of a state, 6 of an action, as HalfCheetah has them), commits every tenth,
and draws batches of 256 transitions with what follows them. With --torchrl, where torchrl is installed, the same into a
`TensorDictReplayBuffer` on `LazyMemmapStorage`, whose files hold what a crash leaves of them, and no uses. A third
process is killed while it inserts and draws. Prints one JSON line: transitions inserted and drawn a second, bytes of a
transition in memory and on disk, and `lost_by_kill`, commits that were acknowledged and are gone.
"""

from __future__ import annotations

import argparse
import os
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import numpy as np
from _harness import emit, machine, say
from headrace_robots.trainer.replay.records import Sampling, Spaces, Stored
from headrace_robots.trainer.replay.store import ReplayStore

CHUNKS, SPACES, BATCH, DRAWS = 200, Spaces(17, 6), 256, 1000
GOALS = {"lost_by_kill": 0}


def main() -> None:
    """Command line."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--episodes", type=int, default=1000)
    parser.add_argument("--torchrl", action="store_true", help="measure torchrl beside it")
    parser.add_argument("--write", type=Path, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.write:
        write(options.write)
        return
    say(machine())
    figures: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as name:
        folder = Path(name)
        for draws in ("uniform", "prioritised"):
            figures |= {
                f"{draws}_{key}": value for key, value in ours(folder, draws, options.episodes).items()
            }
        figures["lost_by_kill"] = float(killed(folder / "killed.sqlite"))
        if options.torchrl:
            for draws in ("uniform", *(["prioritised"] if sum_trees() else [])):
                found = theirs(folder / f"torchrl-{draws}", draws, options.episodes)
                figures |= {f"torchrl_{draws}_{key}": value for key, value in found.items()}
    say(f"at the end: {machine()}")
    emit("replay", figures)


def episode(number: int) -> Stored:
    """Random numbers."""
    random = np.random.default_rng(number)
    states = random.normal(size=(CHUNKS + 1, SPACES.state_size)).astype(np.float32)
    actions = random.uniform(-1, 1, (CHUNKS, SPACES.action_size)).astype(np.float32)
    return Stored(
        (number, 0), 1, states, actions, random.normal(size=CHUNKS).astype(np.float32), False, False
    )


def ours(folder: Path, draws: str, count: int) -> dict[str, float]:
    """Rates and sizes of our store."""
    path = folder / f"{draws}.sqlite"
    store = ReplayStore(path, count * (CHUNKS + 1), SPACES, Sampling(draws=draws))  # type: ignore[arg-type]
    episodes, random = [episode(number) for number in range(count)], np.random.default_rng(0)
    began = time.perf_counter()
    for number, each in enumerate(episodes):
        store.insert(each)
        if number % 10 == 9:
            store.commit()
    inserted_s, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(DRAWS):
        drawn = store.draw(BATCH, random)
        store.prioritise(drawn.rows_B, drawn.rewards_B)
    drawn_s = time.perf_counter() - began
    store.commit()
    store._file.execute("PRAGMA wal_checkpoint(TRUNCATE)")
    found = {
        "inserts_a_second": count * CHUNKS / inserted_s,
        "draws_a_second": DRAWS * BATCH / drawn_s,
        "memory_bytes": store.ring.bytes / (count * CHUNKS),
        "disk_bytes": path.stat().st_size / (count * CHUNKS),
    }
    store.close()
    return found


def theirs(folder: Path, draws: str, count: int) -> dict[str, float]:
    """Those of torchrl, whose transitions hold both states."""
    import torch
    from tensordict import TensorDict
    from torchrl.data import LazyMemmapStorage, TensorDictPrioritizedReplayBuffer, TensorDictReplayBuffer

    torch.set_num_threads(1)
    storage = LazyMemmapStorage(count * CHUNKS, scratch_dir=folder)
    buffer = (
        TensorDictReplayBuffer(storage=storage, batch_size=BATCH)
        if draws == "uniform"
        else TensorDictPrioritizedReplayBuffer(
            alpha=0.6, beta=0.4, storage=storage, batch_size=BATCH, priority_key="td_error"
        )
    )
    rows = [
        TensorDict(
            {
                "state": torch.from_numpy(each.states_TS[:-1]),
                "action": torch.from_numpy(each.actions_TA),
                "reward": torch.from_numpy(each.rewards_T),
                "next": torch.from_numpy(each.states_TS[1:]),
                "done": torch.zeros(CHUNKS, dtype=torch.bool),
            },
            batch_size=[CHUNKS],
        )
        for each in map(episode, range(count))
    ]
    began = time.perf_counter()
    for each in rows:
        buffer.extend(each)
    inserted_s, began = time.perf_counter() - began, time.perf_counter()
    for _ in range(DRAWS):
        drawn = buffer.sample()
        if draws == "prioritised":
            drawn["td_error"] = drawn["reward"].abs()
            buffer.update_tensordict_priority(drawn)
    drawn_s = time.perf_counter() - began
    size = sum(file.stat().st_size for file in folder.rglob("*") if file.is_file())
    return {
        "inserts_a_second": count * CHUNKS / inserted_s,
        "draws_a_second": DRAWS * BATCH / drawn_s,
        "disk_bytes": size / (count * CHUNKS),
    }


def sum_trees() -> bool:
    """Whether torchrl's compiled part is of the torch that is installed: prioritised draws need it."""
    from torchrl.data.replay_buffers.samplers import prioritized

    return getattr(prioritized, "SumSegmentTreeFp32", None) is not None


def write(path: Path) -> None:
    """Inserts and draws until it is killed; says which commit was acknowledged."""
    store, random = ReplayStore(path, 50 * (CHUNKS + 1), SPACES, Sampling()), np.random.default_rng(0)
    for number in range(10**6):
        store.insert(episode(number))
        store.draw(BATCH, random)
        store.commit()
        sys.stdout.write(f"{store.commit_number}\n")
        sys.stdout.flush()


def killed(path: Path) -> int:
    """Commits that a killed process had acknowledged and that are gone, and uses that are missing or too many."""
    command = [sys.executable, __file__, "--write", str(path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = 0
        while said < 120:
            said = int(process.stdout.readline())
        os.kill(process.pid, signal.SIGKILL)
        said = max([said, *(int(line) for line in process.stdout.read().split("\n")[:-1] if line)])
    store = ReplayStore(path, 50 * (CHUNKS + 1), SPACES, Sampling())
    unused = BATCH * store.commit_number - sum(use.uses for use in store.uses())
    lost = max(0, said - store.commit_number)
    store.close()
    return lost + abs(unused)


if __name__ == "__main__":
    main()

"""One rank of a state that goes through groups of several sizes: `python state_ranks.py JOB.json RANK`.

Each stage restores what the one before it saved, and saves it again; of the first stage it is a trained model. In one
that is `apart` the followers see no disk. Rank 0 writes to RESULT which stages hold other bits than the first.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from headrace_modelkit.tensor_files import TensorFiles
from headrace_schema.openings import TrainerConfig
from headrace_trainer.checkpoints.directory import Snapshot, write_state
from headrace_trainer.checkpoints.reader import StateReader
from headrace_trainer.checkpoints.state import STATE, read_state
from headrace_trainer.group.forming import join_trainer_group
from headrace_trainer.learning.step import Version
from headrace_trainer.ranks.messages import RestoreRound, SnapshotRound
from headrace_trainer.ranks.rank import Rank

sys.path.insert(0, str(Path(__file__).resolve().parent))

from trainer_calls import random_sequences


def main() -> None:
    job, number = json.loads(Path(sys.argv[1]).read_text()), int(sys.argv[2])
    runs = Path(job["runs"])
    for generation, stage in enumerate(job["stages"], 1):
        if number < stage["ranks"]:
            go(job, runs, generation, number, stage)
        done = runs / f"done-{generation}"
        if number == 0:
            done.touch()
        end = time.monotonic() + 120
        while not done.exists():
            assert time.monotonic() < end, f"stage {generation} did not end"
            time.sleep(0.02)
    if number == 0:
        states = [tensors_of(runs / str(each)) for each in range(1, len(job["stages"]) + 1)]
        other = [at for at, state in enumerate(states, 1) if not same(state, states[0])]
        moved = any(bool(value.any()) for name, value in states[0].items() if name.startswith("exp_avg/"))
        files = [sorted(path.name for path in (runs / str(at + 1)).glob("*.s*")) for at in range(len(states))]
        Path(job["result"]).write_text(json.dumps({"other": other, "moved": moved, "files": files}))


def go(job: dict[str, Any], runs: Path, generation: int, number: int, stage: dict[str, Any]) -> None:
    where = f"127.0.0.1:{job['ports'][generation - 1]}"
    group = join_trainer_group(generation, number, stage["ranks"], where, 60.0, torch.device("cpu"))
    config = TrainerConfig.model_validate(job["config"])
    rank = Rank(config, group, directory=(runs / "nowhere" if stage["apart"] and number else runs) / "run")
    if generation == 1:
        rank.execute(RestoreRound("", 1))
        rank.backend.micro([[sequence] for sequence in random_sequences(2)])
        assert rank.backend.commit(7.0, 1e-3).finite
    else:
        before = runs / str(generation - 1)
        state = read_state(before / STATE)
        if group.leads:
            rank.reader = StateReader.of_checkpoint(before, state.files, state.optimizer_steps)
        rank.execute(RestoreRound("before", 1, before.name, state.digest))
    directory = runs / str(generation)
    if group.leads:
        directory.mkdir()
    group.all_true(True)
    copy: Any = rank.execute(SnapshotRound(directory.name, in_place=stage["in_place"]))
    if group.leads and stage["in_place"]:
        assert copy.files and not copy.weights, "it is written, and nothing of it is kept"
    if group.leads:
        version = Version(1, 0, 0, "")
        write_state(directory, Snapshot(version, copy, {}, "store", b"", parts=stage["ranks"]))
    rank._writer.wait()
    group.all_true(True)
    group.leave()


def tensors_of(directory: Path) -> dict[str, torch.Tensor]:
    found: dict[str, torch.Tensor] = {}
    for kind in ("weights", "optimizer"):
        files = TensorFiles(sorted(directory.glob(f"{kind}*.safetensors")))
        found |= {name: files.read(name) for name in files.names() if name != "random_state"}
    return found


def same(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(value.equal(other[name]) for name, value in one.items())


if __name__ == "__main__":
    main()

"""Data sets that LeRobot's own class reads as they were written here, and the other way round.

LeRobot runs in an environment of its own (`ci/lerobot.sh`), as `peers/lerobot_data.py`.
"""

from __future__ import annotations

import io
import json
import os
import subprocess
from pathlib import Path

import numpy as np
import pytest
import torch
from headrace_robots.cli.lerobot import EpisodeData, write_data_set
from headrace_robots.demonstrations import Demonstrations
from PIL import Image
from safetensors.torch import load_file, save_file

ROOT = Path(__file__).resolve().parents[4]
PEER = ROOT / ".envs/lerobot/bin/python"
pytestmark = [
    pytest.mark.nightly,  # quick: test_robots_films reads what is written here
    pytest.mark.timeout(300),
    pytest.mark.skipif(not PEER.exists(), reason="sh ci/lerobot.sh makes .envs/lerobot"),
]
LENGTHS, SIZE, TASKS = (11, 24, 17), (64, 96), ["reach the cube", "open the drawer", "reach the cube"]


def picture(step: int) -> np.ndarray:
    """A gradient that moves, which films keep nearly as it is."""
    slope = np.roll(np.linspace(0, 150, SIZE[1]), 3 * step)[None, :, None] + np.array([0, 30, 60])
    return np.broadcast_to(slope, (*SIZE, 3)).astype(np.uint8)


@pytest.fixture(scope="module")
def both(tmp_path_factory):
    """The folder that LeRobot's side has read and written, and the frames."""
    folder, random = tmp_path_factory.mktemp("both"), np.random.default_rng(0)
    count = sum(LENGTHS)
    seen = {
        "state": torch.from_numpy(random.normal(size=(count, 2)).astype(np.float32)),
        "action": torch.from_numpy(random.uniform(-1, 1, (count, 2)).astype(np.float32)),
        "front": torch.from_numpy(np.stack([picture(step) for step in range(count)])).contiguous(),
        "episode": torch.repeat_interleave(torch.arange(len(LENGTHS)), torch.tensor(LENGTHS)),
    }
    save_file(seen, folder / "seen.safetensors")
    (folder / "tasks.json").write_text(json.dumps(TASKS))
    episodes = []
    for number, task in enumerate(TASKS):
        rows = (seen["episode"] == number).nonzero()[:, 0].tolist()
        files = [io.BytesIO() for _ in rows]
        for file, row in zip(files, rows, strict=True):
            Image.fromarray(seen["front"][row].numpy()).save(file, format="PNG")
        states, actions = ([seen[name][row].numpy() for row in rows] for name in ("state", "action"))
        images = {"front": [file.getvalue() for file in files]}
        episodes.append(EpisodeData(task, states, actions, images))
    write_data_set(folder / "ours", episodes, {"front": (*SIZE, 3)}, videos=True)
    environment = {**os.environ, "HF_HUB_OFFLINE": "1", "OMP_NUM_THREADS": "1"}
    command = [PEER, Path(__file__).with_name("peers") / "lerobot_data.py", folder]
    done = subprocess.run(command, capture_output=True, text=True, timeout=240, env=environment)
    assert done.returncode == 0, done.stderr[-3000:]
    return folder, seen


def test_lerobot_reads_what_is_written_here(both):
    folder, seen = both
    found, told = (
        load_file(folder / "read_ours.safetensors"),
        json.loads((folder / "told.json").read_text())["ours"],
    )
    for name in ("state", "action", "episode"):
        assert torch.equal(found[name], seen[name])
    off = (found["front"].permute(0, 2, 3, 1) * 255 - seen["front"].float()).abs()
    assert off.mean() < 1.5 and off.max() < 12
    steps = torch.cat([torch.arange(length) for length in LENGTHS])
    torch.testing.assert_close(found["timestamp"], steps.float() / 10)
    assert told["tasks"] == [TASKS[number] for number in seen["episode"]] and told["fps"] == 10


def test_statistics_are_lerobots(both):
    """Of numbers and of pictures, whose squares it adds up in fp32; its quantiles are read off histograms."""
    told = json.loads((both[0] / "told.json").read_text())
    ours, theirs = told["ours"]["statistics"], told["theirs"]["statistics"]
    assert ours.keys() == theirs.keys()
    for feature, kinds in theirs.items():
        assert ours[feature].keys() == kinds.keys(), feature
        for kind, wanted in kinds.items():
            spread = np.array(kinds["max"]) - np.array(kinds["min"])
            near = 3e-4 if "images" in feature else 1e-4
            loose = 0.15 * spread.max() if kind.startswith("q") else near * max(1.0, spread.max())
            np.testing.assert_allclose(ours[feature][kind], wanted, atol=loose, err_msg=f"{feature} {kind}")


def test_what_lerobot_writes_is_read_here(both):
    """Its films are AV1, several episodes in one file."""
    folder, seen = both
    found = list(Demonstrations(folder / "theirs", ["front"]))
    wanted = load_file(folder / "read_theirs.safetensors")
    assert [each.task for each in found] == TASKS
    assert torch.equal(torch.cat([each.state_TS for each in found]), seen["state"])
    assert torch.equal(torch.cat([each.action_TA for each in found]), seen["action"])
    front = torch.cat([each.images["front"] for each in found])
    their = (wanted["front"].permute(0, 2, 3, 1) * 255).round()
    assert (front.float() - their).abs().max() <= 2, "the same frames as LeRobot decodes"

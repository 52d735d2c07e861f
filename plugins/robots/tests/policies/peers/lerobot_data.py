"""LeRobot's side of data sets: `python lerobot_data.py FOLDER`, in the environment of `ci/lerobot.sh`.

Reads FOLDER/ours by LeRobotDataset, and writes FOLDER/theirs with the frames of seen.safetensors, whose films are AV1.
FOLDER/read_ours.safetensors and read_theirs.safetensors have what LeRobotDataset makes of each; told.json the rest, and
the statistics that LeRobot's own functions make of the frames.
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

import numpy as np
import torch
from lerobot.datasets.lerobot_dataset import LeRobotDataset
from safetensors.torch import load_file, save_file

FEATURES = {
    "observation.state": {"dtype": "float32", "shape": (2,), "names": None},
    "action": {"dtype": "float32", "shape": (2,), "names": None},
}


def written(folder, seen):
    """A data set of LeRobot's own writer."""
    height, width = seen["front"].shape[1:3]
    names = ["height", "width", "channels"]
    features = {
        **FEATURES,
        "observation.images.front": {"dtype": "video", "shape": (height, width, 3), "names": names},
    }
    made = LeRobotDataset.create("local/theirs", fps=10, features=features, root=folder, use_videos=True)
    tasks = json.loads((folder.parent / "tasks.json").read_text())
    for episode in seen["episode"].unique().tolist():
        for row in (seen["episode"] == episode).nonzero()[:, 0].tolist():
            made.add_frame(
                {
                    "observation.state": seen["state"][row].numpy(),
                    "action": seen["action"][row].numpy(),
                    "observation.images.front": seen["front"][row].numpy(),
                    "task": tasks[episode],
                }
            )
        made.save_episode(parallel_encoding=False)
    made.finalize()


def read(name, folder):
    """What LeRobotDataset gives of every moment, and its metadata."""
    found = LeRobotDataset(f"local/{name}", root=folder, video_backend="pyav")
    rows = [found[place] for place in range(len(found))]
    tensors = {
        "front": torch.stack([row["observation.images.front"] for row in rows]),
        "state": torch.stack([row["observation.state"] for row in rows]),
        "action": torch.stack([row["action"] for row in rows]),
        "timestamp": torch.stack([row["timestamp"] for row in rows]),
        "episode": torch.stack([row["episode_index"] for row in rows]),
    }
    save_file(
        {key: value.contiguous() for key, value in tensors.items()},
        folder.parent / f"read_{name}.safetensors",
    )
    statistics = {
        feature: {kind: np.asarray(value).reshape(-1).tolist() for kind, value in kinds.items()}
        for feature, kinds in found.meta.stats.items()
    }
    return {"tasks": [row["task"] for row in rows], "fps": found.fps, "statistics": statistics}


def main(folder):
    seen = load_file(folder / "seen.safetensors")
    written(folder / "theirs", seen)
    told = {name: read(name, folder / name) for name in ("ours", "theirs")}
    (folder / "told.json").write_text(json.dumps(told))


if __name__ == "__main__":
    main(Path(sys.argv[1]))

"""Writes, for each image, what our dists need of others: `python deploy/requirements.py DIRECTORY`.

So the layer with third-party packages depends on these lists and not on our code.
"""

from __future__ import annotations

import re
import sys
import tomllib
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
COMMON = ("proto", "libs/schema", "libs/servicekit[tracing,s3]")
COORDINATOR = (
    "proto",
    "libs/servicekit[tracing,docker,kubernetes,s3]",
    "libs/schema",
    "libs/planner",
)  # the scaler runs in it too
ROBOTS = "plugins/robots[policies]"
IMAGES = {
    "coordinator": (*COORDINATOR, "services/coordinator[oidc]"),
    "coordinator-reasoning-gym": (*COORDINATOR, "services/coordinator[oidc,reasoning-gym]"),
    "coordinator-data": (*COORDINATOR, "services/coordinator[oidc,reasoning-gym,datasets,vision]"),
    "reward": (*COMMON, "services/reward[math,reasoning-gym]"),
    "simulator": (
        *COMMON,
        "services/simulator[gymnasium,vision]",
        "plugins/robots",
        "plugins/search",
        "plugins/environments",
    ),
    "simulator-metaworld": (*COMMON, "services/simulator", "plugins/robots[metaworld]"),
    "simulator-maniskill": (*COMMON, "services/simulator", "plugins/robots[maniskill]"),
    "simulator-libero": (*COMMON, "services/simulator", "plugins/robots[libero]"),
    "torch": (
        *COMMON,
        "libs/modelkit[vision]",
        ROBOTS,
        "services/rollout",
        "services/trainer",
    ),
    "rollout-vllm": (*COMMON, "libs/modelkit[vision]", ROBOTS, "services/rollout[vllm]"),
    "rollout-sglang": (*COMMON, "libs/modelkit", ROBOTS, "services/rollout", "plugins/sglang[engine]"),
}


def third_party(dist: str) -> set[str]:
    """Requirements of a dist, given as FOLDER[EXTRA,…], but those on our own dists."""
    folder, _, extras = dist.rstrip("]").partition("[")
    project = tomllib.loads((ROOT / folder / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    found = list(project.get("dependencies", []))
    for extra in filter(None, extras.split(",")):
        found += project["optional-dependencies"][extra]
    return {requirement for requirement in found if not re.match(r"headrace\b", requirement)}


def main(directory: Path) -> None:
    """One sorted list an image."""
    directory.mkdir(parents=True, exist_ok=True)
    for image, dists in IMAGES.items():
        lines = sorted(set[str]().union(*map(third_party, dists)))
        (directory / f"{image}.txt").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))

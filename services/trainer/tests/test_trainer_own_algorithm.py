"""docs/own-algorithm.md ends with a file; here it is installed as its reader would have it, and holds the contract."""

from __future__ import annotations

import tomllib
from pathlib import Path

import pytest
import torch
from headrace_trainer.algorithms import ALGORITHMS
from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms.contract import check_algorithm

EXAMPLE = Path(__file__).parents[3] / "examples/own_algorithm"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """What `pip install -e examples/own_algorithm` leaves: the folder on the path, and its entry points."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    about = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    about.mkdir()
    (about / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: 0.1.0\n")
    points = [f"[{group}]\n" + "\n".join(f"{name} = {target}" for name, target in found.items())
              for group, found in project["entry-points"].items()]  # fmt: skip
    (about / "entry_points.txt").write_text("\n".join(points))
    for path in (tmp_path, EXAMPLE):
        monkeypatch.syspath_prepend(str(path))


def test_the_example_holds_the_contract_of_algorithms():
    check_algorithm("median-grpo", {"epochs": 2, "minibatches": 2})


def test_an_outlier_does_not_move_the_baseline_and_what_is_near_it_is_not_learned():
    algorithm = ALGORITHMS.choose("median-grpo", {"margin": 0.1}).build()
    outcomes = Outcomes(
        rewards_B=torch.tensor([0.0, 0.05, 9.0, 1.0, 1.0, 0.0], dtype=torch.float64),
        groups_B=torch.tensor([0, 0, 0, 1, 1, 1]),
        mask_BT=torch.tensor([[1, 1], [1, 0], [1, 1], [1, 1], [1, 1], [0, 0]]).bool(),
        lengths_B=torch.tensor([2, 1, 2, 2, 2, 2]),
        longest=2,
    )
    expected = torch.zeros(6, 2, dtype=torch.float64)
    expected[2] = 8.95
    torch.testing.assert_close(algorithm.advantages(outcomes), expected)

"""The algorithm of docs/own-algorithm.md, as its package publishes it."""

import sys
import tomllib
from pathlib import Path

import pytest
import torch
from headrace_trainer.algorithms._base import Outcomes
from headrace_trainer.algorithms.contract import check_algorithm

EXAMPLE = Path(__file__).resolve().parents[3] / "examples" / "own_algorithm"


@pytest.fixture(autouse=True)
def installed(tmp_path, monkeypatch):
    """The package on the path, with the entry points that its pyproject.toml declares."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text())["project"]
    folder = tmp_path / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    folder.mkdir()
    (folder / "METADATA").write_text(f"Name: {project['name']}\nVersion: {project['version']}\n")
    points = project["entry-points"]["headrace.algorithms"]
    lines = [f"{name} = {value}" for name, value in points.items()]
    (folder / "entry_points.txt").write_text("\n".join(["[headrace.algorithms]", *lines]))
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.syspath_prepend(str(EXAMPLE))
    yield
    sys.modules.pop("own_algorithm", None)


def test_it_holds_the_contract_of_algorithms():
    check_algorithm("median", {})
    check_algorithm("median", {"largest": 0.5, "epochs": 2, "clip_high": 0.3})


def test_a_lucky_answer_leaves_the_others_at_zero():
    algorithm = check_algorithm("median", {"largest": 1.0})
    mask_BT = torch.tensor([[1, 1], [1, 0], [1, 1]], dtype=torch.bool)
    rewards_B = torch.tensor([0.0, 0.0, 5.0], dtype=torch.float64)
    outcomes = Outcomes(rewards_B, torch.zeros(3, dtype=torch.long), mask_BT, mask_BT.sum(1), 2)
    assert algorithm.advantages(outcomes).tolist() == [[0, 0], [0, 0], [1, 1]]

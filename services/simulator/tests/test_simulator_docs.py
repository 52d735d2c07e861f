"""The backend of docs/environments.md, published as its page says, does what the page says."""

from __future__ import annotations

import os
import re
from pathlib import Path

import pytest
from headrace.simulator.v1 import simulator_pb2

PAGE = Path(__file__).parents[3] / "docs" / "environments.md"


@pytest.fixture
def published(tmp_path, monkeypatch) -> None:
    """The page's file and entry point as an installed package, for the child processes."""
    text = PAGE.read_text(encoding="utf-8")
    (source,) = re.findall(r"```python\n(.*?)```", text, re.DOTALL)
    (group, entry) = re.findall(r'entry-points\."(.*?)"\]\n(\w+ = )"(.*?)"', text)[0][0::2]
    folder = tmp_path / "site"
    information = folder / "corridor-1.0.dist-info"
    information.mkdir(parents=True)
    (folder / "corridor.py").write_text(source)
    (information / "METADATA").write_text("Metadata-Version: 2.1\nName: corridor\nVersion: 1.0\n")
    (information / "entry_points.txt").write_text(f"[{group}]\ncorridor = {entry}\n")
    path = [str(folder), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(path))


async def test_the_pages_backend_works(published, simulator, arrays):
    pool = await simulator.open("short", backend="corridor", count=2, seed=4, max_episode_steps=50)
    assert pool.opened.instruction == "walk to the goal"
    goals = [float(arrays(await pool.reset(i))["position_and_goal"][1]) for i in range(2)]
    assert goals[0] != goals[1]
    toward = [[1.0 if goals[0] > 0 else -1.0]]
    outcome = await pool.act_chunk(toward * 12, 0)
    assert outcome.status == simulator_pb2.OUTCOME_STATUS_OK and outcome.success

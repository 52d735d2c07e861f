"""Rows and reward functions of verl and TRL, as they are: the examples, shortened."""

from __future__ import annotations

from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[3] / "examples"


@pytest.mark.parametrize("peer", ["verl", pytest.param("trl", marks=pytest.mark.nightly)])
def test_an_example_of_another_trainer_runs(fleet, tiny_model, peer):
    changes = {"model.path": str(tiny_model), "steps": 2, "trainer.warmup.steps": 4, "data.heldout": 16}
    run = fleet.succeed(fleet.client.submit(EXAMPLES / f"from_{peer}" / "run.yaml", changes))
    found = fleet.json("run", "trajectories", run.id, "--limit", "300")["trajectories"]
    assert len(found) >= 16 * 8
    parts = {name.rpartition("reward.py:")[2] for each in found for name in each["parts"]}
    if peer == "verl":
        assert parts == {"compute_score", "compute_score/score", "compute_score/acc", "compute_score/digits"}
    else:
        assert parts == {"digits", "stopped", "stopped/abstained"}
        wrong = [each for each in found if each["completion"][:1] != each["reference"][:1]]
        assert wrong and not any(name.endswith(":stopped") for each in wrong for name in each["parts"])
    assert all(each["prompt"] == f"{each['reference']}=" for each in found)

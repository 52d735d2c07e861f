"""SFT, then DPO, then RL from one file: each run begins with the export of the one before, or is cancelled."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import yaml
from harness.ledger import audit
from headrace.client import HeadraceError, load_specs


@pytest.fixture
def three(tiny_model, spec_of, tmp_path) -> Path:
    """A file of three short runs."""
    texts = [f"{n:03d}" for n in range(0, 1000, 25)]
    pairs = tmp_path / "pairs.jsonl"
    pairs.write_text("".join(json.dumps({"prompt": t, "chosen": t, "rejected": "999"}) + "\n" for t in texts))
    alone: dict[str, Any] = {"model": {"dtype": "float32"}}
    given = {"steps": 2, "algorithm": {"prompts_per_step": 8}, "optimizer": {"lr": 1e-3}}
    digits = {"source": "copy_digits", "options": {"digits": 3}, "prompt": {"chat": False}}
    rows = {"source": "jsonl", "options": {"path": str(pairs), "form": "dpo"}, "prompt": {"chat": False}}
    model = {"path": str(tiny_model), "dtype": "float32"}
    sft = {"name": "sft", "workflow": "supervised", "model": model, "data": digits, **given}
    dpo = {"name": "dpo", "after": "sft", "workflow": "preference", "data": rows, **alone, **given}
    rl = spec_of(steps=1, name="rl", after="dpo", evaluation={}) | alone
    path = tmp_path / "three.yaml"
    path.write_text(yaml.safe_dump_all([sft, dpo, rl]))
    return path


def submitted(fleet, specs):
    """As the command line submits a file."""
    made: dict[str, Any] = {}
    for spec in specs:
        before = made.get(spec.get("after"))
        made[spec["name"]] = fleet.client.submit({**spec, "after": before.id} if before else spec)
    return made


def test_three_runs_are_one_line(fleet, three):
    made = submitted(fleet, load_specs(three))
    ids = [run.id for run in made.values()]
    assert fleet.client.get(ids[2]).waiting_for == [f"run {ids[1]} to succeed"]
    assert fleet.client.get(ids[0]).pipeline == ids
    sft, dpo, rl = (fleet.succeed(run) for run in made.values())
    assert (dpo.spec["model"]["path"], rl.spec["model"]["path"]) == (sft.export_path, dpo.export_path)
    assert dpo.started_at >= sft.finished_at and rl.started_at >= dpo.finished_at
    assert rl.pipeline == ids and audit(fleet, rl).trained
    with pytest.raises(HeadraceError) as refused:
        fleet.client.submit({**load_specs(three)[1], "after": "sfd"})
    (problem,) = refused.value.problems
    assert (problem.key, problem.fix) == ("after", "did you mean sft?")


def test_those_behind_a_cancelled_run_are_cancelled(fleet, three):
    specs = load_specs(three)
    specs[0]["steps"] = 500
    made = submitted(fleet, specs)
    fleet.client.cancel(made["sft"].id)
    for name in ("dpo", "rl"):
        run = fleet.state(made[name], "CANCELLED")
        assert "with whose export it would begin, is CANCELLED" in run.reason and not run.started_at

"""Reward models that a fleet trains: what the trainer says of held-out pairs, the reward service says of the export."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from harness.ledger import audit
from harness.processes import run_python

STEPS, BATCH = 8, 8
# The scorer, in a process of its own, on rows of [prompt, answer]: as the reward service loads and asks it.
SCORE = """
import json, sys
from headrace_reward import scorers
from headrace_reward.scorers.base import Answer

made = scorers.choose("reward_model", json.loads(sys.argv[1])).build()
print(json.dumps(made.score_batch([Answer(prompt, answer) for prompt, answer in json.loads(sys.argv[2])])))
"""


def scores(path: str, rows: list[tuple[str, str]], **options: Any) -> list[float]:
    printed = run_python("-c", SCORE, json.dumps({"path": path, **options}), json.dumps(rows))
    return list(json.loads(printed.splitlines()[-1]))


@pytest.fixture
def judged(tiny_model, tmp_path):
    """Makes a spec of rows."""

    def make(rows: list[dict[str, Any]], **algorithm: Any) -> dict[str, Any]:
        path = tmp_path / "rows.jsonl"
        path.write_text("".join(json.dumps(row) + "\n" for row in rows))
        return {
            "name": "judge",
            "workflow": "reward_model",
            "steps": STEPS,
            "model": {"path": str(tiny_model), "dtype": "float32"},
            "data": {
                "source": "jsonl",
                "options": {"path": str(path), "form": "trl"},
                "heldout": 8,
                "prompt": {"chat": False},
            },
            "algorithm": {"prompts_per_step": BATCH, **algorithm},
            "optimizer": {"lr": 3e-3},
            "evaluation": {"every": STEPS},
        }

    return make


def texts() -> list[str]:
    return [f"{n:03d}" for n in range(0, 1000, 25)]


def test_a_reward_model_is_trained_and_judges_answers_of_another_run(fleet, judged, spec_of):
    rows = [{"prompt": text, "chosen": "7" * 3, "rejected": "1" * 3} for text in texts()]
    run = fleet.succeed(fleet.submit(judged(rows)))
    assert len(audit(fleet, run).trained) == 2 * STEPS * BATCH
    last = run.evaluations[-1]
    assert last.step == STEPS and last.score > 0.9 and last.measure == "accuracy"
    steps = fleet.client.metrics(run.id)
    assert steps[0].figures["loss"] == pytest.approx(0.6931, abs=1e-3)
    assert steps[-1].figures["reward_accuracy"] > 0.9
    # The held-out rows are those that no step has trained.
    trained = {each.prompt for step in steps for each in fleet.client.trajectories(run.id, step=step.step)}
    held = [each["prompt"] for each in last.examples]
    assert held and not trained & {*held}
    spec = spec_of(steps=1, name="scored")
    spec["reward"] = {
        "scorers": [{"name": "reward_model", "options": {"path": run.export_path}}],
        "timeout_s": 60,
    }
    scored = fleet.succeed(fleet.submit(spec))
    made = fleet.client.trajectories(scored.id, limit=10)
    own = scores(run.export_path, [(each.prompt, each.completion) for each in made])
    assert [each.reward for each in made] == pytest.approx(own, abs=1e-4)
    assert len(set(own)) > 1


@pytest.mark.nightly  # quick: test_trainer_judging.py
def test_held_out_margins_are_those_of_the_export(fleet, judged):
    rows = [{"prompt": text, "chosen": text[::-1], "rejected": "999"} for text in texts()]
    spec = judged(rows)
    spec["data"]["heldout"] = 5  # All of them are shown.
    run = fleet.succeed(fleet.submit(spec))
    last = run.evaluations[-1]
    held = [each["prompt"] for each in last.examples]
    found = scores(run.export_path, [(text, each) for text in held for each in (text[::-1], "999")])
    margins = [chosen - rejected for chosen, rejected in zip(found[::2], found[1::2], strict=True)]
    assert last.parts["reward_margin"] == pytest.approx(sum(margins) / len(margins), abs=1e-4)


@pytest.mark.nightly  # quick: test_trainer_judging.py
def test_a_judge_of_steps_says_which_step_is_wrong(fleet, judged):
    rows = [
        {"prompt": text, "completions": ["7" * 3, bad * 3], "labels": [True, bad == "7"]}
        for text in texts()
        for bad in "71"
    ]
    run = fleet.succeed(fleet.submit(judged(rows, name="prm")))
    last = run.evaluations[-1]
    assert last.score > 0.9 and last.parts["loss"] < 0.6
    assert Path(run.export_path, "config.json").exists()
    good, bad = scores(
        run.export_path,
        [(text, f"777\n\n{each}") for text in texts()[:1] for each in ("777", "111")],
        by="step",
        label=1,
    )
    assert good > 0.5 > bad

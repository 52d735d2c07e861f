"""Many runs on the command line: forks, the queue, and runs that yield while somebody watches."""

from __future__ import annotations

import io
import json
import time
from itertools import chain, repeat

import pytest
import yaml
from headrace.client import Run, Step, Trajectory
from headrace_cli.output import console
from headrace_cli.show.reporters import picture
from headrace_cli.show.runs import confidence
from headrace_cli.watching import Snapshot
from headrace_schema.resources.evaluations import EvaluationView
from rich.console import Console

HELD = "1 rollout instance (0 free; held by tiny-000001)"
YIELDED = "yields to tiny-000001, which waits for 1 trainer instance"


def view(run: str = "r-1", **fields) -> dict:
    """A run as the coordinator shows it."""
    made = {"name": f"runs/{run}", "id": run, "state": "RUNNING", "reason": "training", "step": 2, "steps": 9}
    made |= {"created_at": time.time() - 75, "waiting_for": [], "spec": {"name": "mine"}}
    return made | fields


def test_a_fork_has_the_spec_of_its_origin_and_the_overrides(headrace, coordinator):
    spec = {
        "name": "mine",
        "steps": 3,
        "optimizer": {"lr": 1.0},
        "from_checkpoint": {"run": "older", "step": 1},
    }
    coordinator.routes |= {
        "GET /v1/runs/r-1": (200, view(spec=spec)),
        "POST /v1/runs": (201, view("mine-000002", state="QUEUED", forked_from="r-1")),
    }
    done = headrace("run", "fork", "runs/r-1", "--at", "2", "--set", "optimizer.lr=2e-5", "--priority", "3")
    assert done.returncode == 0 and "forked from r-1" in done.stdout and "mine-000002" in done.stdout
    (got,) = coordinator.requests("POST /v1/runs")
    assert got.body == {
        "name": "mine",
        "steps": 3,
        "optimizer": {"lr": 2e-5},
        "from_checkpoint": {"run": "r-1", "step": 2},
        "scheduling": {"priority": 3},
    }
    headrace("run", "fork", "r-1")
    assert coordinator.requests("POST /v1/runs")[1].body == {
        **spec,
        "from_checkpoint": {"run": "r-1", "step": None},
    }


def test_a_forks_dry_run_only_asks(headrace, coordinator):
    coordinator.routes |= {"GET /v1/runs/r-1": (200, view()), "POST /v1/runs": (200, {})}
    done = headrace("run", "fork", "r-1", "--dry-run")
    assert done.returncode == 0 and "nothing was submitted" in done.stdout
    assert [got.query for got in coordinator.requests("POST /v1/runs")] == [{"dry_run": ["true"]}]


def test_a_run_gets_tags_at_submission_and_a_note_later(headrace, coordinator, tmp_path):
    (tmp_path / "spec.yaml").write_text("name: mine\n")
    labelled = (200, view(tags=["paper", "b"], note="kept"))
    coordinator.routes |= {"POST /v1/runs": (201, view()), "POST /v1/runs/r-1:label": labelled}
    coordinator.routes["GET /v1/runs/r-1"] = labelled
    coordinator.routes["GET /v1/runs/r-1/metrics"] = (200, {"steps": []})
    done = headrace("run", "submit", str(tmp_path / "spec.yaml"), "--tag", "paper", "--tag", "b")
    assert done.returncode == 0, done.stderr
    assert headrace("run", "label", "r-1", "--tag", "", "--note", "kept").returncode == 0
    bodies = [got.body for got in coordinator.requests("POST /v1/runs/r-1:label")]
    assert bodies == [{"tags": ["paper", "b"]}, {"tags": [], "note": "kept"}]
    shown = headrace("run", "get", "r-1").stdout
    assert "paper, b" in shown and "kept" in shown
    assert headrace("run", "label", "r-1").returncode == 2


@pytest.mark.parametrize("width", [60, 120])
def test_the_list_shows_place_and_what_is_waited_for(headrace, coordinator, width):
    runs = [
        view("sums-smollm2-000003", state="QUEUED", reason="submitted", place=2, waiting_for=[HELD]),
        view("small-000002", state="QUEUED", reason="resumed", place=1, priority=7, waiting_for=[HELD]),
        view("tiny-000001", state="RUNNING", step=7),
        view("tiny-000000", state="CANCELLED", reason="cancelled while it was queued; it has no checkpoint"),
    ]
    coordinator.routes["GET /v1/runs"] = (200, {"runs": runs})
    console.cache_clear()  # which looks at the width once
    shown = headrace("run", "list", COLUMNS=str(width)).stdout
    console.cache_clear()
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= width
    rows = {run["id"]: next(line for line in lines if run["id"] in line.split()) for run in runs}
    assert rows["sums-smollm2-000003"].split()[1:3] == ["QUEUED", "2"]
    assert rows["small-000002"].split()[1:3] == ["QUEUED", "1"]
    assert rows["tiny-000001"].split()[1] == "RUNNING" and "7/9" in rows["tiny-000001"]
    words = " ".join(shown.split())
    assert words.count("waits for 1 rollout instance") == 2 and "it has no checkpoint" in words
    assert "7" in rows["small-000002"] if width > 100 else "(priority 7)" in words


def test_a_queued_run_is_shown_with_its_place(headrace, coordinator):
    queued = view(state="QUEUED", place=3, priority=-2, waiting_for=[HELD], forked_from="r-0")
    coordinator.routes |= {
        "GET /v1/runs/r-1": (200, queued | {"spec": {"from_checkpoint": {"run": "r-0", "step": None}}}),
        "GET /v1/runs/r-1/metrics": (200, {"steps": []}),
    }
    shown = headrace("run", "get", "r-1").stdout
    for words in ("3 in the queue", "-2", HELD, "r-0 at its newest checkpoint"):
        assert words in shown


def test_a_cancelled_queued_run_claims_no_checkpoint(headrace, coordinator):
    reason = "cancelled while it was queued; it has no checkpoint"
    coordinator.routes["POST /v1/runs/r-1:cancel"] = (200, view(state="CANCELLED", reason=reason))
    assert reason in headrace("run", "cancel", "r-1").stdout


def test_an_ended_run_is_deleted_once_its_user_says_yes(headrace, coordinator, monkeypatch):
    monkeypatch.setattr("sys.stdin", io.StringIO("n\n"))
    ended = view(state="SUCCEEDED", run_directory="/data/runs/r-1")
    coordinator.routes |= {"GET /v1/runs/r-1": (200, ended), "POST /v1/runs/r-1:delete": (200, {"id": "r-1"})}
    refused = headrace("run", "delete", "r-1")
    assert refused.returncode and "/data/runs/r-1" in refused.stderr
    assert not coordinator.requests("POST /v1/runs/r-1:delete")
    silent = headrace("run", "delete", "r-1", "--json")
    assert silent.returncode == 2 and "write --yes --json" in silent.stdout
    assert "run r-1 is deleted" in headrace("run", "delete", "r-1", "--yes").stdout


def test_an_export_names_what_it_lacks(headrace, coordinator, tmp_path):
    away = view(run_directory="/elsewhere/runs/r-1")
    coordinator.routes |= {"GET /v1/runs/r-1": (200, away)}
    done = headrace("run", "export", "r-1")
    assert done.returncode == 2
    assert "python -m headrace_trainer.export /elsewhere/runs/r-1 --to DIRECTORY" in " ".join(
        done.stderr.split()
    )
    coordinator.routes |= {"GET /v1/runs/r-1": (200, away | {"run_directory": str(tmp_path)})}
    done = headrace("run", "export", "r-1", "--to", str(tmp_path / "out"))
    assert done.returncode == 2 and "has no checkpoint" in done.stderr


def test_a_runs_page_is_opened_by_its_id(headrace, coordinator):
    coordinator.routes |= {
        "GET /v1/runs/r-1": (200, view()),
        "POST /v1/links": (201, {"path": "/open?code=c", "expires_in_s": 60}),
    }
    assert headrace("run", "open", "r-1").stdout.strip().endswith("/open?code=c&run=r-1")


def test_watching_goes_on_while_a_run_yields(headrace, coordinator, tmp_path):
    life = [
        view(state="RUNNING"),
        view(state="QUEUED", reason=YIELDED, place=1, waiting_for=[HELD]),
        view(state="PAUSED", reason="checkpoint: put the directory back and resume"),
        view(state="RUNNING", reason="training"),
    ]
    views = chain(life, repeat(view(state="SUCCEEDED", reason="9 steps done", step=9)))
    coordinator.routes |= {
        "POST /v1/runs": (201, view(state="QUEUED")),
        "GET /v1/runs/r-1": lambda got: (200, next(views)),
        "GET /v1/runs/r-1/metrics": (200, {"steps": []}),
        "GET /v1/leases": (200, {"leases": [], "devices": []}),
    }
    (tmp_path / "run.yaml").write_text(yaml.safe_dump({"name": "mine"}))
    done = headrace("run", "submit", str(tmp_path / "run.yaml"), "--watch")
    assert done.returncode == 0, done.stderr
    lines = [line for line in done.stdout.splitlines() if line.startswith(("run r-1", "place"))]
    assert lines == [
        "run r-1 is RUNNING: training",
        f"run r-1 is QUEUED: {YIELDED}",
        f"place 1 in the queue; waits for {HELD}",
        "run r-1 is PAUSED: checkpoint: put the directory back and resume",
        "run r-1 is RUNNING: training",
        "run r-1 is SUCCEEDED: 9 steps done",
    ]


def test_the_picture_says_why_a_run_does_not_run():
    drawn = Console(width=120, file=io.StringIO())
    queued = Run.from_json(view(state="QUEUED", reason=YIELDED, place=2, waiting_for=[HELD]))
    drawn.print(picture(Snapshot(queued), 120))
    shown = drawn.file.getvalue()
    for words in (YIELDED, "place 2 in the queue", f"waits for {HELD}"):
        assert words in shown


def a_step(number: int, reward: float) -> Step:
    figures = {
        "reward_std": 0.5,
        "loss": 0.0123456,
        "entropy": 1.5,
        "grad_norm": 0.25,
        "clip_fraction": 0.125,
    }
    return Step.from_json(
        {"step": number, "reward_mean": reward, "tokens_per_s": 1550.0, "figures": figures, "wall_s": 2.0}
    )


@pytest.mark.parametrize("width", [60, 80, 120])
def test_the_picture_has_the_learning_figures_and_a_sample_and_fits(width):
    drawn = Console(width=width, file=io.StringIO())
    answer = {"step": 3, "reward": 1.0, "prompt": "2 + 2 =", "completion": "the answer is 4 " * 20}
    steps = [a_step(number, reward) for number, reward in ((1, 0.0), (2, 0.5), (3, 1.0))]
    snapshot = Snapshot(Run.from_json(view(state="RUNNING")), steps, sample=Trajectory.from_json(answer))
    drawn.print(picture(snapshot, width), soft_wrap=True)
    shown = drawn.file.getvalue()
    wide = [line for line in shown.splitlines() if "entropy" not in line]  # that line wraps on a terminal
    assert max(map(len, wide)) <= width
    for words in ("reward 1.000 ± 0.500 ▁▅█", "loss 0.01235", "entropy 1.5", "gradient norm 0.25"):
        assert words in shown
    assert "clip fraction 0.125" in shown and "step 3, reward 1.000: " in shown
    assert ("switch" in shown) == (width == 120) and "learn" in shown


def test_an_evaluation_is_shown_with_its_interval_and_pass_at_k():
    fields = {
        "kind": "heldout",
        "step": 1,
        "version": 2,
        "score": 0.5,
        "parts": {},
        "answers": 8,
        "examples": [],
    }
    sure = {"score_low": 0.4, "score_high": 0.6, "pass_at": {"1": 0.5, "4": 0.75}}
    assert confidence(EvaluationView.model_validate(fields | sure)) == " (95%: 0.400 to 0.600; pass@4 0.750)"
    assert confidence(EvaluationView.model_validate(fields)) == ""


def test_runs_are_compared_by_what_differs_and_by_what_came_of_them(headrace, coordinator):
    def step(number, reward):
        return {"step": number, "reward_mean": reward, "wall_s": 2.0, "tokens_per_s": 100.0 * number}

    slow = view(spec={"name": "a", "steps": 9, "optimizer": {"lr": 1e-5, "beta2": 0.95}})
    fast = view("r-2", state="SUCCEEDED", spec={"name": "a", "steps": 9, "optimizer": {"lr": 2e-5}})
    coordinator.routes |= {
        "GET /v1/runs/r-1": (200, slow),
        "GET /v1/runs/r-2": (200, fast),
        "GET /v1/runs/r-1/metrics": (200, {"steps": [step(1, 0.25), step(2, 0.75)]}),
        "GET /v1/runs/r-2/metrics": (200, {"steps": []}),
    }
    found = json.loads(headrace("run", "compare", "r-1", "r-2", "--json").stdout)
    assert found["spec"] == {"optimizer.lr": [1e-5, 2e-5], "optimizer.beta2": [0.95, None]}
    assert found["figures"]["reward, last steps"] == [0.5, None]
    assert found["figures"]["tokens/s, median"] == [150, None] and found["states"] == ["RUNNING", "SUCCEEDED"]
    for width in ("60", "120"):
        shown = headrace("run", "compare", "r-1", "r-2", COLUMNS=width).stdout
        assert "optimizer.lr" in shown and "2e-05" in shown and "name" not in shown
        assert all(len(line) <= int(width) for line in shown.splitlines())
    same = headrace("run", "compare", "r-1", "r-1")
    assert same.returncode == 2 and "name two or more" in same.stderr


def test_a_fork_is_tagged_as_a_submission_is(headrace, coordinator):
    coordinator.routes |= {
        "GET /v1/runs/r-1": (200, view()),
        "POST /v1/runs": (201, view("r-2", forked_from="r-1")),
        "POST /v1/runs/r-2:label": (200, view("r-2", forked_from="r-1", tags=["try"])),
    }
    assert headrace("run", "fork", "r-1", "--tag", "try").returncode == 0
    assert [got.body for got in coordinator.requests("POST /v1/runs/r-2:label")] == [{"tags": ["try"]}]

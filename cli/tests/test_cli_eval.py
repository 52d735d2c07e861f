"""`headrace eval` against a coordinator that only answers: what it sends, and shows on two widths of terminal."""

from __future__ import annotations

import json
import time

import pytest
import yaml
from headrace.client import EvaluationRun
from headrace_cli.output import console
from headrace_cli.show.evaluations import progress_lines

HELD = "1 rollout instance (0 free; held by tiny-000001)"
RESULT = {
    "modes": [
        {"mode": "avg@4", "score": 0.512, "low": 0.4, "high": 0.62},
        {"mode": "pass@4", "score": 0.75, "low": None, "high": None},
    ],
    "parts": {"exact": 0.512},
    "answers": 240,
    "truncated": 0.25,
    "failed": 0,
    "tokens_mean": 17.4,
}


def view(name="eval-00001a", **fields):
    """An evaluation as the coordinator shows it."""
    made = {
        "name": f"evaluations/{name}",
        "id": name,
        "state": "RUNNING",
        "reason": "evaluating",
        "place": None,
    }
    made |= {"suite": "reasoning_gym", "model": "owner/model", "items": 60, "samples": 4, "answers": 120}
    made |= {
        "answers_total": 240,
        "result": None,
        "waiting_for": [],
        "created_at": time.time() - 75,
        "spec": {},
    }
    return made | fields


@pytest.fixture
def shown(headrace):
    """What a command prints on a terminal of a width."""

    def show(width, *arguments):
        console.cache_clear()  # which looks at the width once
        done = headrace("eval", *arguments, COLUMNS=str(width))
        console.cache_clear()
        assert done.returncode == 0, done.stderr
        assert max(len(line.rstrip()) for line in done.stdout.splitlines()) <= width
        return done.stdout

    return show


def test_a_file_is_submitted_with_its_overrides_and_followed_to_the_end(headrace, coordinator, tmp_path):
    spec = {
        "suite": {"name": "gsm8k", "options": {"path": "gsm8k/few.jsonl"}},
        "model": {"path": "owner/model"},
    }
    (tmp_path / "gsm8k").mkdir()
    (tmp_path / "gsm8k" / "few.jsonl").write_text("{}")
    file = tmp_path / "eval.yaml"
    file.write_text(yaml.safe_dump(spec))
    done = view(state="SUCCEEDED", answers=240, result=RESULT)
    coordinator.routes |= {
        "POST /v1/evaluations": (201, view(state="QUEUED", place=1, waiting_for=[HELD])),
        "GET /v1/evaluations/eval-00001a": (200, done),
    }
    out = headrace("eval", str(file), "--set", "samples=4", "--json")
    assert out.returncode == 0 and json.loads(out.stdout) == done
    assert "SUCCEEDED: 240/240 answers" in out.stderr
    (got,) = coordinator.requests("POST /v1/evaluations")
    assert got.body["samples"] == 4
    assert got.body["suite"]["options"]["path"] == str(tmp_path / "gsm8k" / "few.jsonl")


def test_one_that_failed_is_an_error_and_a_dry_run_only_asks(headrace, coordinator, tmp_path):
    file = tmp_path / "eval.yaml"
    file.write_text("suite: {name: gsm8k}\n")
    coordinator.routes |= {
        "POST /v1/evaluations": (201, view()),
        "GET /v1/evaluations/eval-00001a": (200, view(state="FAILED", reason="checkpoint: it is damaged")),
    }
    failed = headrace("eval", str(file))
    assert failed.returncode == 1 and "checkpoint: it is damaged" in failed.stderr
    coordinator.routes["POST /v1/evaluations"] = (200, {"name": "eval"})
    checked = headrace("eval", str(file), "--dry-run")
    assert checked.returncode == 0 and "nothing was queued" in checked.stdout
    assert coordinator.requests("POST /v1/evaluations")[-1].query == {"dry_run": ["true"]}


@pytest.mark.parametrize("width", [60, 120])
def test_the_list_and_one_fit_the_terminal(shown, coordinator, width):
    found = [
        view("eval-00001b", state="QUEUED", place=1, waiting_for=[HELD], answers=0),
        view(state="SUCCEEDED", result=RESULT, checkpoint_run="sums-00000c", checkpoint_step=20),
    ]
    coordinator.routes |= {
        "GET /v1/evaluations": (200, {"evaluations": found}),
        "GET /v1/evaluations/eval-00001a": (200, found[1]),
    }
    listed = shown(width, "list")
    assert "eval-00001b" in listed and "avg@4 0.512, pass@4 0.750" in " ".join(listed.split())
    assert "variant" not in shown(width, "get", "eval-00001a")
    one = " ".join(shown(width, "get", "eval-00001a").split())
    assert "avg@4 0.512 0.400 to 0.620" in one and "sums-00000c at step 20" in one and "25% cut" in one


@pytest.mark.parametrize("width", [60, 120])
def test_a_comparison_shows_difference_interval_and_test(shown, coordinator, width):
    difference = {"mode": "greedy", "first": 0.5, "second": 0.6, "difference": 0.1, "low": -0.02, "high": 0.2}
    difference |= {"wins": 9, "losses": 3, "ties": 48, "p_value": 0.146}
    coordinator.routes["GET /v1/evaluations:compare"] = (
        200,
        {"first": "eval-1", "second": "eval-2", "items": 60, "differences": [difference]},
    )
    text = " ".join(shown(width, "compare", "eval-1", "eval-2").split())
    assert all(
        part in text for part in ("eval-2 minus eval-1", "+0.100", "-0.020 to +0.200", "9/3/48", "0.146")
    )
    (got,) = coordinator.requests("GET /v1/evaluations:compare")
    assert got.query == {"first": ["eval-1"], "second": ["eval-2"]}


@pytest.mark.parametrize("width", [60, 120])
def test_the_picture_of_its_progress_fits(width):
    queued = view(
        state="QUEUED", place=2, waiting_for=[HELD, "the disk of the data directory: no space left"]
    )
    lines = progress_lines(EvaluationRun.from_json(queued), width)
    assert max(map(len, lines)) <= width
    text = " ".join(lines)
    assert "120/240 answers" in text and "50%" in text and "place 2 in the queue" in text and HELD in text


@pytest.mark.parametrize("width", [60, 120])
def test_tasks_have_a_table_and_variants_a_column_of_it(shown, coordinator, width):
    rows = [
        {"task": "PushCube-v1", "variant": "", "items": 48, "score": 0.625, "low": 0.484, "high": 0.748},
        {"task": "PushCube-v1", "variant": "vision", "items": 48, "score": 0.25, "low": 0.149, "high": 0.387},
    ]
    done = view(state="SUCCEEDED", result=RESULT | {"tasks": rows})
    coordinator.routes["GET /v1/evaluations/eval-00001a"] = (200, done)
    text = " ".join(shown(width, "get", "eval-00001a").split())
    assert "none 48 0.625 0.484 to 0.748" in text and "vision 48 0.250 0.149 to 0.387" in text
    assert "240 episodes of 17 actions; 25% cut by the limit" in text


def test_videos_are_asked_for_and_saved(headrace, coordinator, tmp_path):
    """The option asks for some of each task, unless the file says how many; the files are those of the coordinator."""
    file = tmp_path / "eval.yaml"
    file.write_text("model: {path: policies/push}\nsuite: {name: episodes, options: {starts: 8}}\n")
    names = ["0000-0-push-success.mp4", "0001-0-push-failure.mp4"]
    videos = [
        {"name": name, "item": item, "sample": 0, "success": not item, "size_bytes": 5}
        for item, name in enumerate(names)
    ]
    base = "GET /v1/evaluations/eval-00001a"
    coordinator.routes |= {
        "POST /v1/evaluations": (201, view(state="QUEUED")),
        base: (200, view(state="SUCCEEDED", answers=240, result=RESULT)),
        f"{base}/videos": (200, {"videos": videos}),
        **{f"{base}/videos/{name}": (200, f"film {name[3]}") for name in names},
    }
    out = headrace("eval", str(file), "--videos", str(tmp_path / "films"))
    assert out.returncode == 0 and "1 of successes, 1 of failures" in out.stderr
    assert [(tmp_path / "films" / name).read_text() for name in names] == ["film 0", "film 1"]
    again = headrace("eval", str(file), "--set", "suite.options.videos=9", "--videos", str(tmp_path / "more"))
    assert again.returncode == 0
    asked = [got.body["suite"]["options"] for got in coordinator.requests("POST /v1/evaluations")]
    assert asked == [{"starts": 8, "videos": 4}, {"starts": 8, "videos": 9}]
    saved = headrace("eval", "videos", "eval-00001a", str(tmp_path / "later"))
    assert saved.returncode == 0 and sorted(each.name for each in (tmp_path / "later").iterdir()) == names

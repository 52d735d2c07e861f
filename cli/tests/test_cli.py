"""The command line as users and scripts see it: exit codes, JSON, sentences."""

from __future__ import annotations

import json
import os
import pty
import select
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
INVALID = {
    "reason": "INVALID",
    "message": "the run spec has 1 problem",
    "problems": [{"key": "algorithm.grup_size", "problem": "unknown key", "fix": "did you mean group_size?"}],
}


@pytest.fixture
def spec_file(tmp_path):
    path = tmp_path / "run.yaml"
    path.write_text(yaml.safe_dump({"name": "mine", "steps": 3, "algorithm": {"group_size": 8}}))
    return str(path)


def one_document(text: str):
    """The only line of standard output, as JSON."""
    (line,) = text.splitlines()
    return json.loads(line)


def test_submit_with_overrides(headrace, coordinator, scripted_run, spec_file):
    scripted_run()
    result = headrace(
        "run", "submit", spec_file, "--set", "steps=7", "--set", "algorithm.name=grpo", "--json"
    )
    assert result.returncode == 0
    assert one_document(result.stdout)["id"] == "r-1"
    (got,) = coordinator.requests("POST /v1/runs")
    assert got.body == {"name": "mine", "steps": 7, "algorithm": {"group_size": 8, "name": "grpo"}}


def test_refusal_is_exit_2_with_key_problem_and_fix(headrace, coordinator, spec_file):
    coordinator.routes["POST /v1/runs"] = (422, INVALID)
    result = headrace("run", "submit", spec_file)
    assert (result.returncode, result.stdout) == (2, "")
    assert "algorithm.grup_size: unknown key; did you mean group_size?" in result.stderr
    as_json = headrace("run", "submit", spec_file, "--json")
    assert as_json.returncode == 2
    assert one_document(as_json.stdout) == {"error": INVALID}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["run", "submit", "nowhere.yaml"], "nowhere.yaml: cannot be read"),
        (["scale", "rolout=2"], "rollout=2"),
        (["up", "--scale", "rolout=2"], "rollout=2"),
        (["demo", "--preset", "smol"], "tiny or smollm2"),
        (["run", "get", "r-9"], "no /v1/runs/r-9"),
        (["up", "--rollout", "-1"], "--rollout"),
    ],
)
def test_users_mistakes_are_exit_2_and_a_sentence(headrace, arguments, words):
    result = headrace(*arguments)
    assert result.returncode == 2
    assert words in result.stderr and "Traceback" not in result.stderr


def test_no_fleet_is_exit_1_with_what_to_do(headrace, free_port):
    result = headrace("run", "list", HEADRACE_URL=f"http://127.0.0.1:{free_port}")
    assert result.returncode == 1
    assert "headrace up" in result.stderr and "Traceback" not in result.stderr


def test_yaml_error_names_the_place(headrace, tmp_path):
    (tmp_path / "bad.yaml").write_text("steps: [1\nname: x")
    result = headrace("run", "submit", "bad.yaml")
    assert result.returncode == 2 and "line 2" in result.stderr


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("steps: 1\noptimizer: {lr: .nan}", "line 2, column 17: .nan is not a finite number"),
        ("steps: 1\nsteps: 2", "line 2, column 1: the key steps is there already, in line 1"),
        ("data: &d\n  options: *d", "line 2, column 12: *d stands inside"),
        ("x: " + "[" * 5000, "line 1, column 67: is nested deeper"),
    ],
)
def test_odd_yaml_is_a_sentence_with_the_line(headrace, coordinator, tmp_path, text, words):
    (tmp_path / "bad.yaml").write_text(text)
    result = headrace("run", "submit", "bad.yaml")
    assert result.returncode == 2 and f"bad.yaml: {words}" in result.stderr
    assert headrace("run", "submit", "bad.yaml", "--dry-run").returncode == 2
    assert coordinator.received == []


def test_an_override_that_json_lacks_is_a_sentence(headrace, spec_file):
    result = headrace("run", "submit", spec_file, "--set", "optimizer.lr=.inf")
    assert result.returncode == 2 and "optimizer.lr: '.inf' is not a YAML value" in result.stderr


def test_yaml_tags_run_nothing(headrace, tmp_path):
    (tmp_path / "bad.yaml").write_text(f"!!python/object/apply:os.mkdir ['{tmp_path}/made']")
    assert headrace("run", "submit", "bad.yaml").returncode == 2
    assert not (tmp_path / "made").exists()


@pytest.mark.parametrize(
    ("before", "after", "words"),
    [
        (
            "steps: 200",
            "steps\u00a0: 200",
            r"line {at}, column 6: the key 'steps\xa0' holds '\xa0', which cannot be seen",
        ),
        ("steps: 200", "\u200bsteps: 200", r"line {at}, column 1: the key '\u200bsteps'"),
        ("steps: 200", "steps:\u00a0200", r"line {at}, column 7:"),
        ("steps: 200", "steps:\t200", "write spaces in place of the tab"),
        (
            "steps: 200",
            "steps: 200\nsteps: 100",
            "line {next}, column 1: the key steps is there already, in line {at}",
        ),
        ("name: tiny", "name: NO", "name: String should match pattern"),
        ("steps: 200", "steps: 12:30:45", "steps: must be an integer, got '12:30:45' (text)"),
        ("lr: 5.0e-4 ", "lr: 5e-4 ", ""),
        ("name: tiny", "name: 2026-01-01", ""),
        ("steps: 200", "steps: 010", ""),
        ("# A tiny", "\ufeff# A tiny", ""),
    ],
)
def test_a_dry_run_reads_yaml_1_2(headrace, tmp_path, before, after, words):
    """(S3 B17)"""
    text = (EXAMPLES / "tiny.yaml").read_text()
    assert before in text
    at = text[: text.index(before)].count("\n") + 1
    words = words.replace("{at}", str(at)).replace("{next}", str(at + 1))
    (tmp_path / "spec.yaml").write_text(text.replace(before, after, 1), encoding="utf-8")
    result = headrace("run", "submit", "spec.yaml", "--dry-run", HEADRACE_URL="")
    assert result.returncode == (2 if words else 0), result
    assert words in result.stderr and (not words.startswith("line") or "spec.yaml" in result.stderr)


def test_dry_run_without_a_fleet_names_every_problem(headrace, spec_file):
    result = headrace("run", "submit", spec_file, "--dry-run", "--set", "stepz=3", HEADRACE_URL="")
    assert result.returncode == 2
    assert "stepz: unknown key; did you mean steps?" in result.stderr
    assert "model: required key is missing" in result.stderr


@pytest.mark.parametrize(
    "name",
    [
        "tiny",
        "smollm2",
        "own_reward",
        "tiny-megatron",
        "two_rewards",
        "two_policies",
        "from_verl/run",
        "from_trl/run",
    ],
)
def test_examples_are_valid(headrace, name):
    result = headrace("run", "submit", str(EXAMPLES / f"{name}.yaml"), "--dry-run", "--json", HEADRACE_URL="")
    assert result.returncode == 0, result.stderr
    assert one_document(result.stdout)["valid"] is True


VALID = {
    "model": {"path": "no/such-model"},
    "data": {"source": "copy_digits"},
    "reward": {"scorers": [{"name": "exact"}]},
}


@pytest.mark.parametrize(
    ("override", "words"),
    [
        ("algorithm.group_size=2000000000", "algorithm.group_size: 2,000,000,000 samples of 4 prompts"),
        ("sampling.max_new_tokens=2000000000", "sampling.max_new_tokens: must be at most 1048576"),
        ("optimizer.lr=1e6", "optimizer.lr: must be at most 10"),
        (
            "reward.scorers.0.options.api_key=sk-x",
            "reward.scorers[0].options.api_key: holds a secret as it is",
        ),
        ("data.options={url: 'https://me:sk-x@host'}", "data.options.url: holds a secret in an address"),
    ],
)
def test_a_dry_run_refuses_what_cannot_be_meant(headrace, tmp_path, override, words):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(VALID))
    result = headrace("run", "submit", "spec.yaml", "--dry-run", "--set", override, HEADRACE_URL="")
    assert result.returncode == 2 and words in result.stderr
    assert "sk-x" not in result.stderr


def test_without_a_fleet_a_secret_that_is_not_here_is_elsewhere():
    from headrace_cli.offline import problems_without_a_fleet
    from headrace_schema.spec import RunSpec

    trackers = [{"name": "mlflow", "options": {"tracking_uri": "env:NO_SUCH_VARIABLE"}}]
    found = problems_without_a_fleet(RunSpec.model_validate({**VALID, "tracking": {"trackers": trackers}}))
    assert found is not None
    assert "tracking.trackers[0].options.tracking_uri" in [each.key for each in found[1]]
    assert "tracking.trackers[0].options.tracking_uri" not in [each.key for each in found[0]]


def test_a_dry_run_warns_of_what_is_rarely_meant(headrace, coordinator, tmp_path):
    coordinator.routes["POST /v1/runs"] = (200, VALID)
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(VALID))
    odd = (
        "--set",
        "optimizer.lr=0.5",
        "--set",
        "sampling.max_new_tokens=200000",
        "--set",
        "algorithm.group_size=20000",
    )
    for url in ("", coordinator.url):
        result = headrace(
            "run", "submit", "spec.yaml", "--dry-run", *odd, HEADRACE_URL=url, HF_HOME=str(tmp_path)
        )
        assert result.returncode == 0, result.stderr
        for key in ("optimizer.lr", "sampling.max_new_tokens", "algorithm.group_size", "model.path"):
            assert f"warning: {key}: " in result.stderr
    (tmp_path / "hub" / "models--no--such-model").mkdir(parents=True)
    quiet = headrace(
        "run", "submit", "spec.yaml", "--dry-run", "--json", HEADRACE_URL="", HF_HOME=str(tmp_path)
    )
    assert one_document(quiet.stdout)["warnings"] == []


def test_dry_run_asks_a_fleet_that_is_there(headrace, coordinator, spec_file):
    coordinator.routes["POST /v1/runs"] = (200, {"name": "mine"})
    assert headrace("run", "submit", spec_file, "--dry-run").returncode == 0
    assert coordinator.requests("POST /v1/runs")[0].query == {"dry_run": ["true"]}


def test_a_dry_run_tells_what_the_fleet_decides(headrace, coordinator, spec_file):
    why = "rollout.engine: auto takes vllm: it is installed and the run has GPUs"
    coordinator.routes["POST /v1/runs"] = (200, {"name": "mine"}, {"Headrace-Note": why})
    asked = ("run", "submit", spec_file, "--dry-run", "--set", "rollout.engine=auto")
    assert why in " ".join(headrace(*asked).stdout.split())
    assert one_document(headrace(*asked, "--json").stdout)["note"] == why


def test_a_long_check_says_what_is_waited_for(headrace, coordinator, spec_file, monkeypatch):
    monkeypatch.setattr("headrace_cli.connection.SAY_S", 0.05)

    def slow(got):
        time.sleep(0.4)
        return 200, {"name": "mine"}

    coordinator.routes["POST /v1/runs"] = slow
    result = headrace("run", "submit", spec_file, "--dry-run")
    assert result.returncode == 0 and "waiting: the coordinator checks the spec" in result.stderr


def test_own_reward_is_short():
    lines = (EXAMPLES / "own_reward.py").read_text().splitlines()
    assert len(lines) < 20


@pytest.mark.parametrize(("final", "code"), [("SUCCEEDED", 0), ("FAILED", 1), ("CANCELLED", 1)])
def test_watch_ends_with_the_run(headrace, scripted_run, spec_file, final, code):
    scripted_run(steps=3, step_s=0.2, final=final)
    result = headrace("run", "submit", spec_file, "--watch")
    assert result.returncode == code, result.stderr
    assert f"run r-1 is {final}" in result.stdout
    assert "step 3/3 reward=0.800" in result.stdout and "heldout at step 3: 0.750" in result.stdout


def test_watch_as_json_is_lines_of_json(headrace, scripted_run, spec_file):
    scripted_run(steps=1, step_s=0.1)
    headrace("run", "submit", spec_file)
    time.sleep(0.2)
    result = headrace("run", "watch", "r-1", "--json")
    documents = [json.loads(line) for line in result.stdout.splitlines()]
    assert [item["id"] for item in documents] == [1, 2, 3, 4, "r-1"]
    assert headrace("run", "logs", "r-1", "--after", "3", "--json").stdout.count("\n") == 1


@pytest.mark.parametrize(
    "line",
    [
        "run logs r-1 | head -1",
        "run logs r-1 --json | head -1",
        "run get r-1 --json | true",
        "run get nothing 2>&1 | true",
        "--help | true",
    ],
)
def test_a_reader_that_goes_away_ends_the_command_quietly(coordinator, scripted_run, spec_file, line):
    run = scripted_run(steps=1, step_s=0.1)
    data = {"id": 1, "type": "step", "time": 0.0, "run": "runs/r-1", "data": {"step": 1}}
    coordinator.routes["GET /v1/runs/r-1/events"] = (200, f"id: 1\ndata: {json.dumps(data)}\n\n" * 5000)
    run.submitted_at = time.time()
    script = f"set -o pipefail; {sys.executable} -m headrace_cli {line}"
    environment = {**os.environ, "HEADRACE_URL": coordinator.url}
    ended = subprocess.run(
        ["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60
    )
    mistaken = "nothing" in line
    assert (ended.returncode, ended.stderr) in [(0, ""), (1, "")][: 1 + mistaken], ended
    assert "Traceback" not in ended.stdout


def test_interrupted_watch_leaves_the_run(headrace, coordinator, scripted_run, tmp_path, spec_file):
    scripted_run(steps=1000, step_s=0.2)
    command = [sys.executable, "-m", "headrace_cli", "run", "submit", spec_file, "--watch"]
    environment = {**os.environ, "HEADRACE_URL": coordinator.url}
    process = subprocess.Popen(
        command, env=environment, cwd=tmp_path, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert process.stdout is not None and "RUNNING" in process.stdout.readline()
    process.send_signal(signal.SIGINT)
    _, errors = process.communicate(timeout=20)
    assert process.returncode == 130 and "headrace run cancel r-1" in errors and "Traceback" not in errors
    assert not coordinator.requests("POST /v1/runs/r-1:cancel")


def test_tables_and_json_of_everything(headrace, coordinator, scripted_run):
    run = scripted_run(steps=4, step_s=0.01)
    run.submitted_at = time.time() - 10
    run.spec = {"name": "mine"}
    trajectory = {"step": 1, "prompt": "3 + 5 =", "completion": "8\n", "reference": "8", "reward": 1.0}
    instance = {"name": "instances/rollout-0", "kind": "rollout", "state": "READY", "devices": ["host/cpu:0"]}
    coordinator.routes |= {
        "GET /v1/runs": (200, {"runs": [run.view()]}),
        "GET /v1/runs/r-1/trajectories": (200, {"trajectories": [trajectory]}),
        "GET /v1/instances": (200, {"instances": [instance]}),
        "POST /v1/services/rollout:scale": (200, {"kind": "rollout", "count": 2}),
        "POST /v1/services/trainer:scale": (200, {"kind": "trainer", "count": 3}),
        "POST /v1/instances/rollout-0:drain": (200, {"instance": "rollout-0", "incarnation": "i1"}),
        "POST /v1/devices:release": (200, {"device": "GPU-8f2a/gpu:0"}),
        "GET /v1/spec-schema": (200, {"type": "object"}),
    }
    shown = {
        ("run", "list"): "0.350 → 0.750",
        ("run", "get", "r-1"): "128 trained",
        ("run", "trajectories", "r-1"): "8\\n",
        ("run", "certificates", "r-1"): "set digest",
        ("instances",): "cpu:0",
        ("leases",): "r-1",
        ("status",): "rollout-0",
        ("scale", "rollout=2", "trainer=3"): "rollout: 2 wanted, trainer: 3 wanted",
        ("drain", "rollout-0"): "told to drain",
        ("leases", "release", "gpu:0"): "GPU-8f2a/gpu:0: released",
        ("spec-schema",): "object",
    }
    for arguments, words in shown.items():
        result = headrace(*arguments)
        assert result.returncode == 0, (arguments, result.stderr)
        assert words in result.stdout, (arguments, result.stdout)
        one_document(headrace(*arguments, "--json").stdout)


def test_a_terminal_gets_a_picture(coordinator, scripted_run, spec_file):
    scripted_run(steps=6, step_s=0.3)
    leader, follower = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "headrace_cli", "run", "submit", spec_file, "--watch"],
        env={**os.environ, "HEADRACE_URL": coordinator.url, "TERM": "xterm-256color", "COLUMNS": "120"},
        stdin=follower,
        stdout=follower,
        stderr=follower,
    )
    os.close(follower)
    shown = b""
    while select.select([leader], [], [], 20)[0]:
        try:
            shown += os.read(leader, 65536)
        except OSError:  # the other side closed
            break
    os.close(leader)
    assert process.wait(10) == 0
    text = shown.decode()
    for words in ("step 6/6", "held-out 0.350 → 0.750", "trainer-0: learn", "waits for lease on host/cpu:0"):
        assert words in text
    assert "2 + 2 = → four" in text


def test_a_file_of_several_runs_is_submitted_in_order_and_undone_where_one_is_refused(
    headrace, coordinator, scripted_run, tmp_path
):
    scripted_run()
    path = tmp_path / "two.yaml"
    path.write_text("# both\nname: a\nsteps: 3\n---\nname: b\nafter: a\nmodel: {dtype: float32}\n")
    assert headrace("run", "submit", str(path)).returncode == 0
    first, second = coordinator.requests("POST /v1/runs")
    assert first.body == {"name": "a", "steps": 3} and second.body["after"] == "r-1"
    refused = headrace("run", "submit", str(path), "--set", "steps=4")
    assert refused.returncode == 2 and "has 2 runs, and an override is of one" in refused.stderr
    path.write_text("a: 1\n---\n\nb: [\n")
    assert "line 5" in headrace("run", "submit", str(path)).stderr

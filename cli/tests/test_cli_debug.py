"""`headrace debug`: the real servicers in this one process, down to a reward that sees its own process id."""

import json
import os
import subprocess
import sys

import pytest
import yaml

pytestmark = pytest.mark.timeout(400)

SPEC = {
    "name": "debugged",
    "steps": 2,
    "model": {"dtype": "float32"},
    "data": {"source": "copy_digits", "options": {"digits": 1}, "prompt": {"chat": False}},
    "algorithm": {"group_size": 2, "prompts_per_step": 2},
    "sampling": {"max_new_tokens": 2},
    "trainer": {"warmup": {"steps": 1, "batch": 4}},
}
REWARD = """
import os, pathlib
def score(prompt, completion, reference, metadata):
    pathlib.Path({seen!r}).write_text(str(os.getpid()))
    return float(len(completion) % 2)
"""


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    """The tiny model."""
    directory = tmp_path_factory.mktemp("model")
    subprocess.run(
        [sys.executable, "-m", "headrace_modelkit.presets.tiny", str(directory)], check=True, timeout=300
    )
    return directory


def test_the_reward_runs_in_the_process_of_the_command(model, tmp_path):
    """Of a run of conversations, whose environments alone are in processes of their own."""
    seen = tmp_path / "seen"
    (tmp_path / "mine.py").write_text(REWARD.format(seen=str(seen)))
    spec = {key: value for key, value in SPEC.items() if key != "trainer"}
    spec |= {"workflow": "agentic", "environment": {"tasks": ["exchange"], "count": 2}}
    spec |= {
        "data": {"source": "copy_digits"},
        "reward": {"scorers": [{"name": f"{tmp_path}/mine.py:score"}]},
    }
    spec["model"] = {**SPEC["model"], "path": str(model)}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    command = [sys.executable, "-m", "headrace_cli", "debug", str(tmp_path / "spec.yaml"), "--json"]
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, text=True, env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    output, _ = process.communicate(timeout=300)
    events = [json.loads(line) for line in output.splitlines() if line.startswith('{"type"')]
    assert process.returncode == 0
    assert [e["state"] for e in events if e["type"] == "run_state_changed"][-1] == "SUCCEEDED"
    assert int(seen.read_text()) == process.pid


def test_a_breakpoint_stops_at_an_answer_and_quitting_it_ends_the_run_as_interrupted(model, tmp_path):
    (tmp_path / "mine.py").write_text(
        "def score(prompt, completion, reference, metadata):\n    breakpoint()\n    return 1.0\n"
    )
    spec = {**SPEC, "reward": {"scorers": [{"name": f"{tmp_path}/mine.py:score"}]}}
    spec["model"] = {**SPEC["model"], "path": str(model)}
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump(spec))
    ended = subprocess.run(
        [sys.executable, "-m", "headrace_cli", "debug", str(tmp_path / "spec.yaml")],
        input="p ('asked', prompt)\nc\nq\n",
        capture_output=True,
        text=True,
        timeout=300,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )
    assert ended.returncode == 130
    assert ended.stdout.count("(Pdb)") == 3
    assert "('asked', '')" not in ended.stdout and "('asked', '" in ended.stdout
    # What happens meanwhile is shown when the debugger goes on, and never behind its prompt.
    prompts = [line for line in ended.stdout.splitlines() if line.startswith("(Pdb)")]
    assert not any("run_" in line or "slots" in line for line in prompts)
    assert "Traceback" not in ended.stderr


def test_a_wrong_key_is_exit_code_2_and_names_it(tmp_path):
    (tmp_path / "spec.yaml").write_text(yaml.safe_dump({**SPEC, "stepz": 3}))
    command = [sys.executable, "-m", "headrace_cli", "debug", str(tmp_path / "spec.yaml")]
    ended = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 2
    assert "stepz" in ended.stderr


def test_a_run_that_fails_ends_the_command_with_its_whole_reason(headrace, tmp_path, monkeypatch):
    why = f"nothing was trained: {'x' * 200}"

    def failing(spec, say):
        say("run_state_changed", {"state": "FAILED", "reason": why})
        return "FAILED"

    monkeypatch.setattr("headrace_cli.commands.debug.run_debug", failing)
    (tmp_path / "spec.yaml").write_text(
        yaml.safe_dump({**SPEC, "model": {"path": "m"}, "reward": {"scorers": [{"name": "exact"}]}})
    )
    result = headrace("debug", "spec.yaml")
    assert result.returncode == 1
    assert f"the run FAILED: {why}" in result.stderr

"""Standard streams and files that cannot be written, and texts whose line ends are no line feeds."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
import sys
import time

import pytest


def _bash(coordinator, line):
    script = line.replace("headrace ", f"{sys.executable} -m headrace_cli ")
    environment = {**os.environ, "HEADRACE_URL": coordinator.url}
    return subprocess.run(["bash", "-c", script], env=environment, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize(
    "command",
    ["--help", "--version", "spec-schema", "run list", "run list --json", "run watch r-1", "run logs r-1"],
)
@pytest.mark.parametrize(
    ("where", "reason"), [("> /dev/full", "No space left on device"), (">&-", "it is closed")]
)
def test_output_that_cannot_be_written_is_told_in_one_line(coordinator, scripted_run, command, where, reason):
    """(S3 B17)"""
    run = scripted_run(steps=1, step_s=0.01)
    run.submitted_at = time.time() - 10
    coordinator.routes |= {
        "GET /v1/spec-schema": (200, {"type": "object"}),
        "GET /v1/runs": (200, {"runs": [run.view()]}),
    }
    ended = _bash(coordinator, f"headrace {command} {where}")
    assert (ended.returncode, ended.stdout) == (1, "")
    assert ended.stderr == f"error: standard output cannot be written: {reason}\n"


@pytest.mark.parametrize("where", ["2> /dev/full", "2>&-", "<&- 2>&-"])
def test_errors_that_cannot_be_written_change_no_status(coordinator, where):
    """(S3 B17)"""
    ended = _bash(coordinator, f"headrace --version {where}")
    assert ended.returncode == 0 and ended.stdout.startswith("headrace ")
    assert _bash(coordinator, f"headrace nothing {where}").returncode == 2
    for lost in ("> /dev/full 2> /dev/full", ">&- 2>&- <&-"):
        ended = _bash(coordinator, f"headrace --version {lost}")
        assert (ended.returncode, ended.stdout, ended.stderr) == (1, "", "")


def test_no_file_of_a_command_gets_the_number_of_a_closed_stream(coordinator):
    """(S3 B17)"""
    code = (
        "import sys; from headrace_cli.output import standard_streams\n"
        "with standard_streams(): file = open('/dev/null'); sys.exit(file.fileno())"
    )
    assert _bash(coordinator, f"{sys.executable} -c {shlex.quote(code)} <&- >&- 2>&-").returncode > 2


def test_a_full_disk_under_a_file_is_told_by_its_name(headrace, coordinator, scripted_run, tmp_path):
    """(S3 B17)"""
    scripted_run(steps=1, step_s=0.01)
    kept = {"name": "step-1.recording", "step": 1, "size_bytes": 3}
    coordinator.routes["GET /v1/runs/r-1/recordings"] = (200, {"recordings": [kept], "wanted": []})
    coordinator.routes["GET /v1/runs/r-1/recordings/step-1.recording"] = (200, "abc")
    (tmp_path / ".mine.partial").symlink_to("/dev/full")
    ended = headrace("record", "r-1", "--step", "1", "--to", str(tmp_path / "mine"))
    assert ended.returncode == 1, ended
    assert ended.stderr == f"error: {tmp_path / 'mine'} cannot be written: No space left on device\n"


def test_logs_that_are_not_followed_end_while_the_run_goes_on(headrace, coordinator, scripted_run):
    scripted_run(steps=1000, step_s=10)
    result = headrace("run", "logs", "r-1", "--no-follow", "--json")
    assert result.returncode == 0 and len(result.stdout.splitlines()) == 4, result
    asked = coordinator.requests("GET /v1/runs/r-1/events")
    assert [each.query for each in asked] == [{"follow": ["false"]}]


def test_an_event_keeps_the_line_ends_of_other_alphabets(headrace, coordinator, scripted_run):
    """(S3 B17)"""
    scripted_run(steps=1, step_s=0.01).submitted_at = time.time() - 10
    data = {"id": 1, "type": "warning", "time": 0.0, "run": "runs/r-1", "data": {"text": "a\u2028b\x85c"}}
    line = json.dumps(data, ensure_ascii=False)
    coordinator.routes["GET /v1/runs/r-1/events"] = (200, f"id: 1\ndata: {line}\n\n")
    result = headrace("run", "logs", "r-1", "--json")
    assert json.loads(result.stdout.split("\n")[0])["data"]["text"] == "a\u2028b\x85c", result

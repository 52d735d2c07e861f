"""The hour on a GPU is rehearsed on the CPU, and whatever a check does, the next one runs and each has its line."""

import json
import subprocess
import sys
import time
import zipfile
from pathlib import Path

import gpu_check
import pytest
import torch
from gpu_check import Check, every, install, one, watched, why_not

SCRIPT = Path(gpu_check.__file__)


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3():
    ended = run()
    assert ended.returncode == 3 and "no GPU" in ended.stderr and not ended.stdout


@pytest.mark.timeout(240)
def test_quick_checks_run_on_the_cpu_and_each_has_a_line():
    ended = run("--device", "cpu", "--only", "basics", "weight_sync")
    assert ended.returncode == 0, ended.stdout + ended.stderr
    basics, sync, summary = map(json.loads, ended.stdout.splitlines())
    assert (basics["check"], basics["status"]) == ("basics", "passed") and basics["figures"]["ranks"]
    assert sync["status"] == "passed" and sync["figures"]["digest_gb_per_s"] > 0
    assert summary["figures"]["passed"] == 2 and not summary["figures"]["failed"]


PRINTS = "import json; print('a word'); print(json.dumps({'status': 'passed', 'figures': {'x': 1}}))"


@pytest.mark.parametrize(
    ("code", "status", "reason"),
    [
        (PRINTS, "passed", None),
        ("raise RuntimeError('no room')", "failed", "RuntimeError: no room"),
        ("import sys; sys.exit(4)", "failed", "it ended with status 4"),
        ("import os; os.kill(os.getpid(), 9)", "died", "signal 9 ended it"),
        ("import time; time.sleep(60)", "late", "it did not end within 1 s"),
    ],
)
def test_a_check_that_raises_dies_or_hangs_is_one_finding(code, status, reason):
    found = watched([sys.executable, "-c", code], 1.0 if status == "late" else 30.0)
    assert (found["status"], found.get("reason")) == (status, reason)


def test_what_a_late_check_has_started_is_ended_with_it(tmp_path, monkeypatch):
    """Its child would keep the GPU from the next check: SIGTERM alone does not reach it."""
    monkeypatch.setattr(gpu_check, "GRACE_S", 0.5)
    file = tmp_path / "child"
    code = (
        "import signal, subprocess, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); "
        f"open({str(file)!r}, 'w').write(str(subprocess.Popen(['sleep', '60']).pid)); time.sleep(60)"
    )
    assert watched([sys.executable, "-c", code], 3.0)["status"] == "late"
    child, deadline = Path("/proc") / file.read_text(), time.monotonic() + 10
    while child.exists() and "(sleep) Z" not in (child / "stat").read_text():
        assert time.monotonic() < deadline, "its child still runs"
        time.sleep(0.05)


def test_every_check_is_run_whatever_the_ones_before_did(monkeypatch, capsys):
    made = iter(
        [
            {"status": "failed", "reason": "x"},
            {"status": "late", "reason": "y"},
            {"status": "passed", "figures": {}},
        ]
    )
    monkeypatch.setattr(gpu_check, "watched", lambda command, deadline_s: next(made))
    checks = [Check(name, 10) for name in "abc"] + [Check("d", 10, needs="no_such_engine")]
    assert every(checks, 0, "cpu", 100.0) == 1
    *lines, summary = map(json.loads, capsys.readouterr().out.splitlines())
    assert [line["status"] for line in lines] == ["failed", "late", "passed", "skipped"]
    assert lines[-1]["reason"].startswith("no_such_engine is not installed")
    assert [summary["figures"][name] for name in ("passed", "failed", "late", "skipped")] == [1, 1, 1, 1]


def test_what_cannot_run_says_why(monkeypatch):
    assert why_not(Check("a", 10, gpus=2), 1, 99.0) == "it needs 2 GPUs and there is 1"
    assert why_not(Check("a", 10, gpus=2), 2, 99.0) == why_not(Check("a", 10, gpus=2), 0, 99.0) == ""
    assert why_not(Check("a", 10), 1, 3.0) == "no time is left: 3 s"


def test_a_finding_with_problems_fails(monkeypatch, tmp_path):
    import _gpu_checks

    code = (
        "import sys, pathlib, _gpu_checks, gpu_check; "
        "_gpu_checks.bad = lambda bench: _gpu_checks.Finding({'x': 1}, ('too much', 'too late')); "
        "print('noise'); sys.exit(gpu_check.one('bad', 0, pathlib.Path('.')))"
    )
    found = watched(
        [sys.executable, "-c", f"import sys; sys.path.insert(0, {str(SCRIPT.parent)!r}); {code}"], 60.0
    )
    assert found == {"status": "failed", "figures": {"x": 1}, "reason": "too much; too late"}
    assert {check.name for check in gpu_check.CHECKS} <= set(vars(_gpu_checks)) and one


def test_checks_fit_in_ten_minutes_but_for_a_few_that_come_last():
    assert sum(check.deadline_s for check in gpu_check.CHECKS[:5]) <= gpu_check.LIMIT_S


def test_carried_wheels_are_installed_without_an_index(monkeypatch, tmp_path):
    monkeypatch.setattr(gpu_check, "ENVIRONMENT", tmp_path / "env")
    with pytest.raises(SystemExit, match="holds no wheel"):
        install(tmp_path)
    name = "carried-1.0"
    with zipfile.ZipFile(tmp_path / f"{name}-py3-none-any.whl", "w") as wheel:
        wheel.writestr("carried.py", "SAYS = 'from a folder'\n")
        wheel.writestr(f"{name}.dist-info/METADATA", "Metadata-Version: 2.1\nName: carried\nVersion: 1.0\n")
        wheel.writestr(
            f"{name}.dist-info/WHEEL", "Wheel-Version: 1.0\nRoot-Is-Purelib: true\nTag: py3-none-any\n"
        )
        wheel.writestr(f"{name}.dist-info/RECORD", "")
    python = install(tmp_path)
    code = "import carried; print(carried.SAYS)"
    assert (
        subprocess.run([python, "-c", code], capture_output=True, text=True, check=True).stdout
        == "from a folder\n"
    )

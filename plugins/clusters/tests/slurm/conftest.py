"""Jobs without Slurm: stubs of its programs, which start and signal real processes as it does, and a scripted
coordinator.

That Slurm does so is what integration_tests/clusters/test_slurm_jobs.py shows on a real one.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

sys.path.insert(0, str(Path(__file__).resolve().parents[4] / "integration_tests"))

from harness.fixtures import fixtures_of

globals().update(fixtures_of("cli"))

REWARD = {"scorers": [{"name": "exact"}]}
SRUN = """#!/bin/bash
# One process a step. As the real one does, it ends its task with SIGKILL when it gets a signal, and passes none on.
for word; do case $word in --nodelist=*) node=${word#*=} ;; up | join) part=$word ;; esac; done
if [ "$(cat "$STUBS/broken" 2>/dev/null)" = "$node" ]; then
  echo "error: --listen: is broken; mend it" >&2
  exit 2
fi
bash "$STUBS/part" "$node" "$part" &
task=$!
echo $task >"$STUBS/tasks/$node"
trap 'kill -KILL $task; echo "srun: forcing job termination" >&2; exit 143' TERM INT
wait $task
status=$?
rm -f "$STUBS/tasks/$node"
exit $status
"""
PART = """# What `headrace up --foreground` is from outside: it holds the fleet's lock, says where it is, and saves
# at SIGTERM.
trap 'sleep 0.2; echo "$1: saved" >>"$STUBS/log"; kill $!; exit 0' TERM
if [ "$2" = up ]; then
  exec 9>>"$STUBS/data/fleet.lock"
  flock -n 9
  cat >"$STUBS/data/fleet.json" <<JSON
{"launcher_pid": $$, "phase": "running", "url": "$STUB_URL", "grpc_address": "", "token_file": "", "shared_memory": "",
 "redis_url": "", "started_at": 0, "processes": []}
JSON
fi
echo "$1: $2" >>"$STUBS/log"
sleep 300 >/dev/null 2>&1 9>&- &
wait $!
"""
SCANCEL = """#!/bin/bash
# Signals the tasks of steps, and neither srun nor the batch script.
echo "scancel $*" >>"$STUBS/log"
for file in "$STUBS"/tasks/*; do [ -e "$file" ] && kill -TERM "$(cat "$file")"; done
exit 0
"""
SCONTROL = """#!/bin/bash
case "$1 $2" in
  "show hostnames") printf 'n1\\nn2\\n' ;;
  "show node") echo "NodeName=n1 NodeAddr=nowhere.invalid NodeHostName=n1" ;;
  requeue*) echo "requeue $2" >>"$STUBS/log"; kill -KILL $PPID ;;
esac
"""


class StubbedJob:
    """A job of two nodes whose batch script is a real process, and what its stubs wrote down."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder = folder
        for name in ("bin", "tasks", "data"):
            (folder / name).mkdir()
        (folder / "part").write_text(PART)
        for name, text in {"srun": SRUN, "scancel": SCANCEL, "scontrol": SCONTROL}.items():
            (folder / "bin" / name).write_text(text)
            (folder / "bin" / name).chmod(0o755)
        spec = {"model": {"path": "m"}, "steps": 3, "data": {"source": "copy_digits"}, "reward": REWARD}
        (folder / "run.yaml").write_text(yaml.safe_dump(spec))
        kept = {key: value for key, value in os.environ.items() if not key.startswith(("HEADRACE_", "SLURM"))}
        self.environment = {
            **kept,
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "STUBS": str(folder),
            "STUB_URL": url,
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "n[1-2]",
            "HEADRACE_URL": "http://127.0.0.1:9",  # of another fleet, from the shell that submitted the job
            "COLUMNS": "160",
            "NO_COLOR": "1",
        }
        self._started: list[subprocess.Popen[str]] = []

    def start(self, *options: str) -> subprocess.Popen[str]:
        """Starts the batch script's command."""
        words = [
            sys.executable,
            "-m",
            "headrace_cli",
            "slurm",
            "job",
            "run.yaml",
            "--data-dir",
            "data",
            *options,
        ]
        job = subprocess.Popen(
            words,
            env=self.environment,
            cwd=self.folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        self._started.append(job)
        return job

    @property
    def log(self) -> list[str]:
        """What the stubs did."""
        file = self.folder / "log"
        return file.read_text().splitlines() if file.exists() else []

    def kill(self) -> None:
        """Ends what a failed test has left."""
        for file in (self.folder / "tasks").glob("*"):
            subprocess.run(["kill", "-TERM", file.read_text().strip()], check=False)
        for job in self._started:
            job.kill()
            job.communicate(timeout=20)


@pytest.fixture
def stubbed(tmp_path: Path, coordinator: Any) -> Iterator[StubbedJob]:
    """A job whose two nodes are ready as soon as both have started."""
    made = StubbedJob(tmp_path, coordinator.url)

    def instances(got: Any) -> tuple[int, Any]:
        names = ["rollout-0", "trainer-0", "reward-0", "simulator-0"] if "n1: up" in made.log else []
        names += ["rollout-0.n2"] if "n2: join" in made.log else []
        views = [
            {
                "name": name,
                "incarnation": "",
                "kind": name.partition("-")[0],
                "state": "READY",
                "host": "",
                "address": "",
                "devices": [],
            }
            for name in names
        ]
        return 200, {"instances": views}

    coordinator.routes["GET /v1/instances"] = instances
    yield made
    made.kill()


@pytest.fixture
def paused_run(scripted_run: Callable[..., Any], coordinator: Any) -> Any:
    """A run of many steps that can be paused, and then has one step more."""
    run = scripted_run(1000, 0.2)
    paused: list[int] = []

    def pause(got: Any) -> tuple[int, Any]:
        paused.append(run.done)
        return 200, view()

    def resume(got: Any) -> tuple[int, Any]:
        paused.clear()
        return 200, view()

    def view() -> dict[str, Any]:
        return run.view() | ({"state": "PAUSED", "step": paused[0]} if paused else {})

    coordinator.routes |= {
        "POST /v1/runs/r-1:pause": pause,
        "POST /v1/runs/r-1:resume": resume,
        "GET /v1/runs/r-1": lambda got: (200, view()),
    }
    return run

"""What only a GPU can show is refused without one, and its script runs through on the CPU."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch

SCRIPT = Path(__file__).parent.parent / "gpu_check.py"


def run(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *arguments], capture_output=True, text=True, timeout=200, check=False
    )


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
def test_without_a_gpu_it_says_so_and_exits_3():
    ended = run()
    assert ended.returncode == 3 and "no NVIDIA GPU" in ended.stderr and not ended.stdout


@pytest.mark.timeout(240)
def test_its_code_runs_on_the_cpu():
    ended = run("--rehearse")
    assert ended.returncode == 0, ended.stderr
    [line] = ended.stdout.splitlines()
    figures = json.loads(line)["figures"]
    assert figures["passed"] and figures["checks"]["second_lease_refused"]

"""The benchmark of loading and saving in parts, with a small model."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[1] / "load.py"


@pytest.mark.nightly  # test_every_script starts it
@pytest.mark.timeout(300)
def test_two_ranks_load_and_save_a_small_model():
    command = [sys.executable, str(SCRIPT), "--small"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr
    line = json.loads(done.stdout)
    figures = line["figures"]
    assert line["benchmark"] == "load"
    assert figures["shard_gb"] * 1e9 / 4 > 8_000_000, "half of the parameters in fp32"
    assert figures["host_bytes_vs_shard"] > 0 and 0 < figures["stop_s"] < figures["save_s"]

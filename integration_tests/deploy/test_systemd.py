"""The systemd units: what they start is what `headrace` takes, and what they stop ends in order."""

import configparser
import shutil
import subprocess
import sys

import pytest
from harness.processes import ROOT, clean_environment, free_port
from harness.waiting import wait_for

UNITS = sorted((ROOT / "deploy/systemd").glob("*.service"))
HEADRACE = [sys.executable, "-m", "headrace_cli"]


def service_of(unit):
    read = configparser.ConfigParser(interpolation=None, strict=False)
    read.optionxform = str
    read.read(unit)
    return read["Service"]


def words_of(unit, key, data_dir, start):
    """The command of a unit's key with this checkout's `headrace`, on a data directory of the test's."""
    words = service_of(unit)[key].split()
    assert words[0].endswith("/bin/headrace") and words[-2] == "--data-dir"
    given = [part for word in words[1:-1] for part in (start if word == "$HEADRACE_START" else [word])]
    return [*HEADRACE, *given, str(data_dir)]


@pytest.mark.parametrize("unit", UNITS, ids=lambda unit: unit.name)
def test_a_unit_waits_longer_for_the_end_than_trainers_take_to_save(unit):
    found = service_of(unit)
    assert found["KillMode"] == "mixed" and int(found["TimeoutStopSec"]) > 120
    assert found["Environment"] == "HEADRACE_START=up"
    if tool := shutil.which("systemd-analyze"):
        done = subprocess.run([tool, "verify", "--man=no", unit], capture_output=True, text=True, timeout=60)
        wrong = [line for line in done.stderr.splitlines() if "is not executable" not in line]
        assert not wrong, done.stderr


def test_what_a_unit_starts_serves_until_what_it_stops_with(tmp_path):
    port = str(free_port())
    none = [part for kind in ("rollout", "trainer", "reward", "simulator") for part in (f"--{kind}", "0")]
    start = words_of(UNITS[0], "ExecStart", tmp_path / "data", ["up", "--port", port, *none])
    served = subprocess.Popen(
        start, env=clean_environment(), stdin=subprocess.DEVNULL, start_new_session=True
    )
    try:
        status = [*HEADRACE, "status", "--data-dir", str(tmp_path / "data"), "--json"]
        asked = {
            "env": clean_environment(),
            "capture_output": True,
            "timeout": 60,
            "stdin": subprocess.DEVNULL,
        }
        wait_for(lambda: subprocess.run(status, **asked).returncode == 0, "the fleet to serve", 90)
        stopped = subprocess.run(words_of(UNITS[0], "ExecStop", tmp_path / "data", []), **asked)
        assert stopped.returncode == 0 and served.wait(60) == 0
    finally:
        served.kill()
